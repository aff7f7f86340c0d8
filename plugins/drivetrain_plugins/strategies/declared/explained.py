"""Errors that modules meet which work elsewhere, because of how a strategy holds their parameters."""

from __future__ import annotations

#: Of strategies whose parameters are DTensors.
SHARDS = {
    r"DTensor|tensor subclass": "strategy={strategy} holds parameters as shards, of which a rank has its own; where"
    " it is about one, call parameter.full_tensor() on all ranks where values are needed, or use strategy=ddp",
}
#: Of those that free the whole weights of a block when its forward pass is over.
GATHERED = {
    r"setStorage|storage of size 0": "strategy={strategy} frees whole weights after each pass, so a gradient of a"
    " gradient (create_graph=True) finds none: use strategy=ddp",
    "not have been used in the graph": "strategy={strategy} computes with whole weights in the place of parameters, so"
    " that autograd.grad finds no way to one of these: use strategy=ddp",
    **SHARDS,
}
#: Of those whose parameters are empty but during a pass.
EMPTY = {
    r"tensor [ab] \(0\)|size \[0\]|torch\.Size\(\[0\]\)|must be a matrix": "strategy={strategy} with stage=3 leaves"
    " parameters empty between passes, which may be why: read them within deepspeed.zero.GatheredParameters, or use"
    " stage=2",
}
#: Of a pipeline, whose steps see the network's output only.
ELSEWHERE = {
    "not have been used in the graph": "the step of strategy={strategy} has what comes out of the network, which was"
    " computed elsewhere, so no gradient goes through it to its input: use strategy=ddp",
}
