import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.attention import check
from experiments.attention.cases import DROPOUT_SEED, Case, Sparsity, Tensors, make_tensors
from experiments.attention.check import RESULTS
from kernels.reference.standard import dropout_keep_mask, standard_attention

CPU = torch.device("cpu")
SMALL = Case(batch=2, seq_len=48, n_head=2, head_dim=16, dtype=torch.float16)
BUTTERFLY = Sparsity("butterfly", 1, 16)


def whole_answer(tensors, **options):
    """Attention of one head (T, D) and its gradients, by the specification in kernels/."""
    leaves = [x[None, :, None].clone().requires_grad_() for x in tensors[:3]]
    out, _ = standard_attention(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, tensors[3][None, :, None])
    return dict(zip(RESULTS, (x[0, :, 0] for x in (out.detach(), *grads)), strict=True))


def one_head(seq_len, head_dim=16):
    return Tensors(*torch.randn(4, seq_len, head_dim, dtype=torch.float64))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores_per_chunk", [1, 50 * 7, 10**6])
def test_exact_attention_in_chunks(causal, scores_per_chunk):
    case = Case(1, 50, 1, 16, causal=causal)
    head = one_head(50)
    visible = partial(check.visible_keys, case, batch=0, device=CPU)
    got = check.head_attention(head, visible, scores_per_chunk=scores_per_chunk)
    want = whole_answer(head, causal=causal)
    for name in RESULTS:
        torch.testing.assert_close(got[name], want[name])


def test_exact_attention_with_padding_sees_the_first_keys():
    case = Case(3, 50, 1, 16, padded=True)
    length = int(case.kv_lengths("cpu")[1])
    assert length < 50
    q, k, v, dout = head = one_head(50)
    visible = partial(check.visible_keys, case, batch=1, device=CPU)
    got = check.head_attention(head, visible)
    want = whole_answer((q, k[:length], v[:length], dout))
    for name in ("out", "dq"):
        torch.testing.assert_close(got[name], want[name])
    for name in ("dk", "dv"):
        torch.testing.assert_close(got[name][:length], want[name])
        assert not got[name][length:].any()


def test_exact_attention_with_dropout():
    case = replace(SMALL, dropout_p=0.25)
    tensors = make_tensors(case, CPU)
    expected = check.answer(case, tensors)
    assert expected.heads == [(0, 0)]
    head = Tensors(*(x[0, :, 0].detach().double() for x in tensors))
    want = whole_answer(head, dropout_p=0.25, dropout_seed=DROPOUT_SEED)
    for name in RESULTS:
        torch.testing.assert_close(expected.exact[name][0], want[name])
    # the mask of the first head is the same in a batch of any size
    keep = partial(dropout_keep_mask, 1, seq_q=8, seq_k=8, dropout_p=0.25)
    assert keep(batch=1, n_head=1)[0, 0].equal(keep(batch=3, n_head=2)[0, 0])


def test_the_verdict_takes_no_nan_and_no_infinite_budget():
    right, budgets = dict.fromkeys(RESULTS, 0.1), dict.fromkeys(RESULTS, 0.1)
    assert check.verdict(right, budgets) == "ok"
    for name in RESULTS:
        for found, budget in ((0.11, 0.1), (math.nan, 0.1), (0.1, math.nan), (0.1, math.inf)):
            said = check.verdict(right | {name: found}, budgets | {name: budget})
            assert said.startswith("wrong: error")
            assert f"of {name}" in said
