"""The choice of the backend on real GPUs: a trial allocation and its mapping to the peers."""

import os

import harness
import pytest
import torch

pytest.importorskip("cutlass", reason="needs the extra: pip install 'moonep-megatron[gpu]'")

from moonep_megatron.backends import choice


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_of_one_machine_can(ranks):
    harness.run(ranks, _can)


def _can(group, device):
    reason = choice.why_not_symmetric(group, 8, topk=8, hidden=64, ffn=128, dtype=torch.bfloat16)
    assert reason is None, reason
    del os.environ[choice.OVERLAPPING]
    choice._answers.clear()
    reason = choice.why_not_symmetric(group, 8)
    if group.size() > torch.cuda.device_count():
        assert "share" in reason, reason
    else:
        assert reason is None, reason
