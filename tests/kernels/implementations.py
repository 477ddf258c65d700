"""Which kernels the tests of attention are run with: the portable ones, and those for Hopper.

The latter on a GPU alone, and only for what they serve.
"""

import pytest

from kernels import flash_attention

IMPLS = ["triton", pytest.param("hopper", marks=pytest.mark.gpu)]


def attention_by(impl):
    """`flash_attention` by these kernels, which returns out and lse.

    A test whose call the kernels for Hopper refuse is skipped with what they say.
    """

    def attention(q, k, v, **options):
        try:
            return flash_attention(q, k, v, impl=impl, return_lse=True, **options)
        except ValueError as error:
            if impl == "hopper" and "cannot serve this call" in str(error):
                pytest.skip(str(error))
            raise

    return attention
