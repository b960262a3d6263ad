"""Faults in rings, peers, flows, and in what torch is asked for."""

from .mutant import mutants, of_runtime

STEPS = of_runtime("streams", "skips")
STREAMS = of_runtime("streams")
SKIPS = of_runtime("skips")
MATRIX = of_runtime("streams", "streams_matrix")
PINNED = of_runtime("pinned_batches")
BY_HOST = of_runtime("by_host")
PEERS = of_runtime("peer_pairs")
FLOW = of_runtime("stream_gpus")
FAILED = of_runtime("streams_faults", "skips")
PARTS = of_runtime("peer_pairs", "capture")
RECOMPUTE = of_runtime("recompute_gpus")
OUTSIDE = ("tests/outside/test_loss_outside_gpus.py",)
# With torch's own engine.
ENGINE = ("-n0", *(f"tests/device_oracle/{name}_on_gpus.py" for name in ("batches", "steps")))
TUNE = ("-n0", "tests/device_oracle/tune_on_gpus.py")
LINK = of_runtime("host_link")
HOST = ("tests/parallel/test_host_optimizer_gpus.py",)

OF_RINGS = (
    *mutants(
        "pykern/runtime/gpu/rings.py",
        STEPS,
        ("buffer is None or buffer.numel() < num_bytes", "buffer is None"),
        ("not spot.fits(like)", "False"),
        ("self.outgrown.append(buffer)", "pass"),
        ("        self._memory.synchronize()\n", ""),
        ("self._addresses.add(buffer.data_ptr())", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        SKIPS,
        ("program.is_half or program.has(Kind.W)", "program.is_half"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        OUTSIDE,
        ("program.is_half or program.has(Kind.W)", "program.has(Kind.W)"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        RECOMPUTE,
        (
            "if kind not in (Kind.F, Kind.B, Kind.I):",
            "if kind not in (Kind.F, Kind.B, Kind.I, Kind.R):",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        STEPS,
        (
            "transfers, held[ring.slots[microbatch]] = outbox.pop(microbatch)",
            "transfers, _ = outbox.pop(microbatch)",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        MATRIX,
        (
            "return self._forth if kind is Kind.F else self._back",
            "return {Kind.F: self._forth, Kind.B: self._back}.get(kind, {})",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        SKIPS,
        ("slots = self._ring if kind is Kind.F else ring", "pass"),
        ("name = (kind.name, self._stage)", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        STREAMS,
        ("return [self._own(output) for output in outputs]", "return outputs"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        (*SKIPS, *OUTSIDE),
        ("if not self._keeps:", "if True:"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        MATRIX,
        (
            "return [None if gradient is None else self._own(gradient) for gradient in gradients]",
            "return gradients",
        ),
        ("return copy_in_graph(tensor) if self._ring.owns(tensor) else tensor", "return tensor"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        STREAMS,
        ("source = self._own(as_bytes(tensor))", "source = as_bytes(tensor)"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        BY_HOST,
        ("by_host = not self._lanes.reaches(self._ring.lane, ring.lane)", "by_host = False"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        SKIPS,
        ("carrier_of([ring.lane for ring in self._rings], self._stage, kind)", "self._stage"),
        ("step = 1 if way is Kind.F else -1", "step = 1"),
    ),
    *mutants(
        "pykern/runtime/gpu/rings.py",
        MATRIX,
        ("span(tensor) * tensor.element_size()", "tensor.numel() * tensor.element_size()"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        FAILED,
        ("        self._forth.clear()\n        self._back.clear()\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/rings.py",
        STREAMS,
        ("        self._addresses -= {buffer.data_ptr() for buffer in self.outgrown}\n", ""),
        ("in self.outgrown}\n        self.outgrown.clear()\n", "in self.outgrown}\n"),
    ),
    *mutants(
        "pykern/runtime/gpu/rings.py",
        MATRIX,
        ("return tensor.resolve_conj().resolve_neg()", "return tensor"),
    ),
    *mutants(
        "pykern/runtime/gpu/ring_transport.py",
        (*SKIPS, *OUTSIDE),
        (".requires_grad_(value.requires_grad)", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        PINNED,
        ("if not is_pinned(batch.given):", "if True:"),
        ("            raise\n        read.wait()", "            raise"),
        (
            "with suppress(RuntimeError):\n                read.wait()\n            raise\n",
            "raise\n",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        HOST,
        ("self.gpus.join_beside()", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        STREAMS,
        ("self._end.atexit = False", "self._end.detach()"),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        SKIPS,
        ("return with_gradients and all(", "return all("),
        ("            if self._capture is not False:\n                return False\n", ""),
        (
            "reaches(lanes[a], lanes[b]) and reaches(lanes[b], lanes[a])",
            "reaches(lanes[a], lanes[b])",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        OUTSIDE,
        (
            "first, lanes = forwards_first(plan), self.gpus.lanes",
            "first, lanes = plan, self.gpus.lanes",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/peers.py",
        PEERS,
        ("lanes.avoid(sender, receiver)", "pass"),
        ("self._gpus.enable_peer(sender, receiver)", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/peers.py",
        ENGINE,
        ("        self._gpus.synchronize()\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/peers.py",
        PEERS,
        ("((one, other), (other, one))", "((one, other),)"),
        ("~pattern_of(sender)", "pattern_of(sender)"),
        ("            self._checked.add(pair)\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/peers.py",
        PARTS,
        ("len(pair) == 2 and ", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/peers.py",
        PEERS,
        (" if lanes.reaches(a, b)]", "]"),
        ("self.wrong.append((sender, receiver))", "pass"),
        (
            "        lanes.copy_at_once(\n            [\n",
            "        any(lanes.copy_at_once([copy]) for copy in\n            [\n",
        ),
    ),
    *mutants(
        "pykern/runtime/gpu/host_link.py",
        LINK,
        ('torch.empty_like(like, device="meta").stride()', "like.stride()"),
        ("like.numel() * dtype.itemsize", "like.numel() * like.dtype.itemsize"),
    ),
    *mutants(
        "pykern/runtime/gpu/host_link.py",
        HOST,
        ("self._gpus.join_beside()", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/stream.py",
        FLOW,
        ("        self._gpus.follow(done, output)\n", ""),
    ),
    *mutants(
        "pykern/runtime/gpu/stream.py",
        ENGINE,
        ("with torch.no_grad(), self._gpus.aside():", "with torch.no_grad():"),
    ),
    *mutants(
        "pykern/runtime/gpu/stream.py",
        FLOW,
        (
            "            done = self._gpus.mark()\n",
            "            done = self._batches[-1][2] if self._batches else self._gpus.mark()\n",
        ),
        ("self._batches.append((0, None, self._gpus.mark(), (call, batch)))", "pass"),
    ),
    *mutants(
        "pykern/runtime/gpu/cuda.py",
        ENGINE,
        ("        for event in self.events:\n            event.synchronize()\n", ""),
        ("        stream.wait_stream(torch.cuda.current_stream(gpu))\n", ""),
        ("torch.cuda.current_stream(gpu).wait_stream(stream)", "pass"),
    ),
    *mutants(
        "pykern/modes.py",
        TUNE,
        ("        torch.cuda.init()  #", "        pass  #"),
    ),
    *mutants(
        "pykern/runtime/gpu/cuda.py",
        ENGINE,
        ("torch.cuda.current_stream(gpu).wait_event(event)", "pass"),
        ("tensor.record_stream(torch.cuda.current_stream(tensor.device))", "pass"),
        ("stream.wait_stream(torch.cuda.current_stream(stream.device))", "pass"),
        ("            set_stream()\n", ""),
        ("for stream in before:", "for stream in ():"),
    ),
    *mutants(
        "pykern/runtime/gpu/streams.py",
        ENGINE,
        (
            "self._read_in_the_end(batch), torch.autograd.set_multithreading_enabled(False)",
            "self._read_in_the_end(batch)",
        ),
    ),
)
