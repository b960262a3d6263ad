"""Split backward captured: F, I and W as graphs, and gradients added into what is there."""

from pathlib import Path

import torch
from torch import Tensor, nn

from .frame import Json
from .tools import DEVICE, captured, launch, own_stream, warm


def run(folder: Path) -> Json:
    stage, x, upstream = task()
    figures = {
        "w_on_the_same_stream": split(stage, x, upstream, w_elsewhere=False),
        "accumulated": accumulated(stage, x, upstream),
    }
    # Last, because a capture that fails leaves torch in a state that nobody promises to be good.
    try:
        figures["w_on_another_stream"] = split(stage, x, upstream, w_elsewhere=True)
    except RuntimeError as error:
        figures["w_on_another_stream"] = {"error": str(error)[:500]}
    return figures


def control() -> bool:
    """A step without its W."""
    return not any(split(*task(), w_elsewhere=False, has_w=False)["weight_gradients_equal"])


def task() -> tuple[nn.Module, Tensor, Tensor]:
    """A stage, its input, and the gradient that comes in."""
    torch.autograd.set_multithreading_enabled(False)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.Tanh())]
    stage = nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(128, 512, device=DEVICE, requires_grad=True)
    return stage, x, torch.randn(128, 512, device=DEVICE)


def split(
    stage: nn.Module, x: Tensor, upstream: Tensor, *, w_elsewhere: bool, has_w: bool = True
) -> Json:
    """I keeps the graph for W. On another stream W has a cuBLAS workspace of its own, if the
    autograd engine leaves it on that stream."""
    parameters = list(stage.parameters())
    main = own_stream()
    other = own_stream() if w_elsewhere else main

    def whole() -> tuple[Tensor, ...]:
        return torch.autograd.grad(stage(x), [x, *parameters], upstream)

    wanted = whole()
    warm(whole, main)
    warm(whole, other)
    forward, output = captured(lambda: stage(x), main)
    inputs, (into_x,) = captured(
        lambda: torch.autograd.grad(output, [x], upstream, retain_graph=True), main, forward.pool()
    )
    weights, into_weights = captured(
        lambda: torch.autograd.grad(output, parameters, upstream), other, forward.pool()
    )
    for tensor in (into_x, *into_weights):
        tensor.zero_()
    torch.cuda.synchronize()
    launch(forward, main)
    launch(inputs, main)
    other.wait_stream(main)
    if has_w:
        launch(weights, other)
    torch.cuda.synchronize()
    return {
        "input_gradient_equal": torch.equal(into_x, wanted[0]),
        "weight_gradients_equal": [
            torch.equal(a, b) for a, b in zip(into_weights, wanted[1:], strict=True)
        ],
    }


def accumulated(stage: nn.Module, x: Tensor, upstream: Tensor) -> Json:
    """backward() into .grad that was there before the capture: two launches add up twice."""
    parameters = list(stage.parameters())
    wanted = torch.autograd.grad(stage(x), parameters, upstream)
    stream = own_stream()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    addresses = [parameter.grad.data_ptr() for parameter in parameters]  # type: ignore[union-attr]

    def work() -> None:
        stage(x).backward(upstream, inputs=parameters)

    warm(work, stream)
    graph, _ = captured(work, stream)
    for parameter in parameters:
        parameter.grad.zero_()  # type: ignore[union-attr]
    torch.cuda.synchronize()
    launch(graph, stream)
    launch(graph, stream)
    torch.cuda.synchronize()
    grads = [parameter.grad for parameter in parameters]
    return {
        "grad_stays_in_place": [grad.data_ptr() for grad in grads if grad is not None] == addresses,
        "two_launches_add_up": [
            grad is not None and torch.equal(grad, 2 * once)
            for grad, once in zip(grads, wanted, strict=True)
        ],
    }
