# For type checkers in a checkout, which do not follow papilio/__init__.py. A wheel has kernels/.
from kernels import *  # noqa: F403
