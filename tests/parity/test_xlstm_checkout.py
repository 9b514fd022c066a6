"""Our sLSTM against the layer of NX-AI/xlstm: run with ``--xlstm=FOLDER``, a checkout of it."""

from pathlib import Path

import pytest
import torch

from stateline.bench.peers import find_peers
from stateline.layers import SLSTM

WIDTH, HEADS = 64, 4


def test_an_slstm_is_that_of_its_authors(request: pytest.FixtureRequest) -> None:
    folder: Path | None = request.config.getoption("--xlstm")
    if folder is None:
        pytest.skip("no checkout of NX-AI/xlstm: name its folder with --xlstm=FOLDER")
    torch.manual_seed(0)
    peer = find_peers([f"xlstm={folder}"], ["slstm"])["slstm"]["xlstm"]("slstm", WIDTH)
    ours, x = SLSTM(WIDTH, n_heads=HEADS), torch.randn(2, 41, WIDTH)
    theirs, cell = peer.layer, peer.layer.slstm_cell
    with torch.no_grad():
        for weight in peer.parameters():
            weight.copy_(0.3 * torch.randn_like(weight))
        # Their names of the first two gates are exchanged; what they compute is not.
        maps = (theirs.fgate, theirs.igate, theirs.zgate, theirs.ogate)
        ours.weight.copy_(torch.stack([part.weight.mT for part in maps], dim=2))
        ours.recurrent.copy_(cell._recurrent_kernel_int2ext(cell._recurrent_kernel_))
        ours.bias.copy_(cell._bias_int2ext(cell._bias_).transpose(0, 1))
        ours.norm_weight.copy_(1 + theirs.group_norm.weight.view(HEADS, -1))
        ours.conv.kernel.copy_(theirs.conv1d.conv.weight[:, 0].flip(-1))
        ours.conv.bias.copy_(theirs.conv1d.conv.bias)
        wanted = peer.eval()(x)
        torch.testing.assert_close(ours(x), wanted, rtol=1e-5, atol=1e-5)
        _, state = ours.forward_chunk(x[:, :40], ours.init_state(2))
        stepped, _ = ours.step(x[:, 40], state)
        torch.testing.assert_close(stepped, wanted[:, 40], rtol=1e-5, atol=1e-5)
        taken = peer.step(x[:, 40:], peer.prefill(x[:, :40]))
        torch.testing.assert_close(taken[:, 0], wanted[:, 40], rtol=1e-5, atol=1e-5)
