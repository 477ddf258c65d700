"""Block-sparse masks: layouts, and the lists of blocks that the kernels read."""

from . import patterns as patterns
