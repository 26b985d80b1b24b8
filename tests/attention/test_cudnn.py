"""cuDNN's attention is allowed inside the block alone, and nowhere but on CUDA. The flag can be set without a GPU."""

from __future__ import annotations

import pytest
import torch

from chiasm.attention.cudnn import cudnn_attention

FLAG = torch.backends.cuda


@pytest.mark.parametrize("before", [True, False])
def test_the_flag_is_as_it_was_behind_the_block_whatever_happens_in_it(before: bool) -> None:
    kept = FLAG.cudnn_sdp_enabled()
    try:
        FLAG.enable_cudnn_sdp(before)
        with cudnn_attention(torch.device("cuda")):
            assert FLAG.cudnn_sdp_enabled()
        assert FLAG.cudnn_sdp_enabled() is before
        with pytest.raises(ValueError, match="broke"), cudnn_attention(torch.device("cuda")):
            raise ValueError("broke")
        assert FLAG.cudnn_sdp_enabled() is before
        with cudnn_attention(torch.device("cpu")):
            assert FLAG.cudnn_sdp_enabled() is before
    finally:
        FLAG.enable_cudnn_sdp(kept)
