"""Kernels that the tests of attention run with: the portable ones, and those for Hopper.

The Hopper kernels run only on a GPU, and only calls that they support.
"""

import pytest

from kernels import flash_attention

IMPLS = ["triton", pytest.param("hopper", marks=pytest.mark.gpu)]


def attention_by(impl):
    """`flash_attention` with these kernels, returning out and lse.

    If the Hopper kernels refuse a call, its test is skipped with their reason.
    """

    def attention(q, k, v, **options):
        try:
            return flash_attention(q, k, v, impl=impl, return_lse=True, **options)
        except ValueError as error:
            if impl == "hopper" and "cannot serve this call" in str(error):
                pytest.skip(str(error))
            raise

    return attention
