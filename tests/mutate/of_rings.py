"""Faults in rings, peers, flows, and in what torch is asked for."""

from .mutant import Mutant


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/runtime/test_{name}.py" for name in names)


STEPS = _files("streams", "skips")
STREAMS = _files("streams")
SKIPS = _files("skips")
MATRIX = _files("streams", "streams_matrix")
PINNED = _files("pinned_batches")
BY_HOST = _files("by_host")
PEERS = _files("peer_pairs")
FLOW = _files("stream_gpus")
FAILED = _files("streams_faults", "skips")
PARTS = _files("peer_pairs", "capture")
RECOMPUTE = _files("recompute_gpus")
OUTSIDE = ("tests/outside/test_loss_outside_gpus.py",)
# With torch's own engine.
ENGINE = ("-n0", *(f"tests/device_oracle/{name}_on_gpus.py" for name in ("batches", "steps")))
TUNE = ("-n0", "tests/device_oracle/tune_on_gpus.py")
LINK = _files("host_link")
HOST = ("tests/parallel/test_host_optimizer_gpus.py",)

OF_RINGS = (
    Mutant(
        "pykern/runtime/gpu/rings.py",
        "buffer is None or buffer.numel() < num_bytes",
        "buffer is None",
        STEPS,
    ),
    Mutant("pykern/runtime/gpu/rings.py", "not spot.fits(like)", "False", STEPS),
    Mutant("pykern/runtime/gpu/rings.py", "self.outgrown.append(buffer)", "pass", STEPS),
    Mutant("pykern/runtime/gpu/rings.py", "        self._memory.synchronize()\n", "", STEPS),
    Mutant("pykern/runtime/gpu/rings.py", "self._addresses.add(buffer.data_ptr())", "pass", STEPS),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "program.is_half or program.has(Kind.W)",
        "program.is_half",
        SKIPS,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "program.is_half or program.has(Kind.W)",
        "program.has(Kind.W)",
        OUTSIDE,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "if kind not in (Kind.F, Kind.B, Kind.I):",
        "if kind not in (Kind.F, Kind.B, Kind.I, Kind.R):",
        RECOMPUTE,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "transfers, held[ring.slots[microbatch]] = outbox.pop(microbatch)",
        "transfers, _ = outbox.pop(microbatch)",
        STEPS,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "return self._forth if kind is Kind.F else self._back",
        "return {Kind.F: self._forth, Kind.B: self._back}.get(kind, {})",
        MATRIX,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "slots = self._ring if kind is Kind.F else ring",
        "pass",
        SKIPS,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py", "name = (kind.name, self._stage)", "pass", SKIPS
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "return [self._own(output) for output in outputs]",
        "return outputs",
        STREAMS,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "if not self._keeps:",
        "if True:",
        (*SKIPS, *OUTSIDE),
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "return [None if gradient is None else self._own(gradient) for gradient in gradients]",
        "return gradients",
        MATRIX,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "return copy_in_graph(tensor) if self._ring.owns(tensor) else tensor",
        "return tensor",
        MATRIX,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "source = self._own(as_bytes(tensor))",
        "source = as_bytes(tensor)",
        STREAMS,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "by_host = not self._lanes.reaches(self._ring.lane, ring.lane)",
        "by_host = False",
        BY_HOST,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "carrier_of([ring.lane for ring in self._rings], self._stage, kind)",
        "self._stage",
        SKIPS,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "step = 1 if way is Kind.F else -1",
        "step = 1",
        SKIPS,
    ),
    Mutant(
        "pykern/runtime/gpu/rings.py",
        "span(tensor) * tensor.element_size()",
        "tensor.numel() * tensor.element_size()",
        MATRIX,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        "        self._forth.clear()\n        self._back.clear()\n",
        "",
        FAILED,
    ),
    Mutant(
        "pykern/runtime/gpu/rings.py",
        "        self._addresses -= {buffer.data_ptr() for buffer in self.outgrown}\n",
        "",
        STREAMS,
    ),
    Mutant(
        "pykern/runtime/gpu/rings.py",
        "in self.outgrown}\n        self.outgrown.clear()\n",
        "in self.outgrown}\n",
        STREAMS,
    ),
    Mutant(
        "pykern/runtime/gpu/rings.py",
        "return tensor.resolve_conj().resolve_neg()",
        "return tensor",
        MATRIX,
    ),
    Mutant(
        "pykern/runtime/gpu/ring_transport.py",
        ".requires_grad_(value.requires_grad)",
        "",
        (*SKIPS, *OUTSIDE),
    ),
    Mutant("pykern/runtime/gpu/streams.py", "if not is_pinned(batch.given):", "if True:", PINNED),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "            raise\n        read.wait()",
        "            raise",
        PINNED,
    ),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "with suppress(RuntimeError):\n                read.wait()\n            raise\n",
        "raise\n",
        PINNED,
    ),
    Mutant("pykern/runtime/gpu/streams.py", "self.gpus.join_beside()", "pass", HOST),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "self._end.atexit = False",
        "self._end.detach()",
        STREAMS,
    ),
    Mutant("pykern/runtime/gpu/streams.py", "return with_gradients and all(", "return all(", SKIPS),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "            if self._capture is not False:\n                return False\n",
        "",
        SKIPS,
    ),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "reaches(lanes[a], lanes[b]) and reaches(lanes[b], lanes[a])",
        "reaches(lanes[a], lanes[b])",
        SKIPS,
    ),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "first, lanes = forwards_first(plan), self.gpus.lanes",
        "first, lanes = plan, self.gpus.lanes",
        OUTSIDE,
    ),
    Mutant("pykern/runtime/gpu/peers.py", "lanes.avoid(sender, receiver)", "pass", PEERS),
    Mutant(
        "pykern/runtime/gpu/peers.py", "self._gpus.enable_peer(sender, receiver)", "pass", PEERS
    ),
    Mutant("pykern/runtime/gpu/peers.py", "        self._gpus.synchronize()\n", "", ENGINE),
    Mutant("pykern/runtime/gpu/peers.py", "((one, other), (other, one))", "((one, other),)", PEERS),
    Mutant("pykern/runtime/gpu/peers.py", "~_pattern(sender)", "_pattern(sender)", PEERS),
    Mutant("pykern/runtime/gpu/peers.py", "            self._checked.add(pair)\n", "", PEERS),
    Mutant("pykern/runtime/gpu/peers.py", "len(pair) == 2 and ", "", PARTS),
    Mutant("pykern/runtime/gpu/peers.py", " if lanes.reaches(a, b)]", "]", PEERS),
    Mutant("pykern/runtime/gpu/peers.py", "self.wrong.append((sender, receiver))", "pass", PEERS),
    Mutant(
        "pykern/runtime/gpu/host_link.py",
        'torch.empty_like(like, device="meta").stride()',
        "like.stride()",
        LINK,
    ),
    Mutant(
        "pykern/runtime/gpu/host_link.py",
        "like.numel() * dtype.itemsize",
        "like.numel() * like.dtype.itemsize",
        LINK,
    ),
    Mutant("pykern/runtime/gpu/host_link.py", "self._gpus.join_beside()", "pass", HOST),
    Mutant("pykern/runtime/gpu/stream.py", "        self._gpus.follow(done, output)\n", "", FLOW),
    Mutant(
        "pykern/runtime/gpu/stream.py",
        "with torch.no_grad(), self._gpus.aside():",
        "with torch.no_grad():",
        ENGINE,
    ),
    Mutant(
        "pykern/runtime/gpu/stream.py",
        "            done = self._gpus.mark()\n",
        "            done = self._batches[-1][2] if self._batches else self._gpus.mark()\n",
        FLOW,
    ),
    Mutant(
        "pykern/runtime/gpu/stream.py",
        "self._batches.append((0, None, self._gpus.mark(), (call, batch)))",
        "pass",
        FLOW,
    ),
    Mutant(
        "pykern/runtime/gpu/cuda.py",
        "        for event in self.events:\n            event.synchronize()\n",
        "",
        ENGINE,
    ),
    Mutant(
        "pykern/runtime/gpu/cuda.py",
        "        stream.wait_stream(torch.cuda.current_stream(gpu))\n",
        "",
        ENGINE,
    ),
    Mutant(
        "pykern/runtime/gpu/cuda.py",
        "torch.cuda.current_stream(gpu).wait_stream(stream)",
        "pass",
        ENGINE,
    ),
    Mutant("pykern/modes.py", "        torch.cuda.init()  #", "        pass  #", TUNE),
    Mutant(
        "pykern/runtime/gpu/cuda.py",
        "torch.cuda.current_stream(gpu).wait_event(event)",
        "pass",
        ENGINE,
    ),
    Mutant(
        "pykern/runtime/gpu/cuda.py",
        "tensor.record_stream(torch.cuda.current_stream(tensor.device))",
        "pass",
        ENGINE,
    ),
    Mutant(
        "pykern/runtime/gpu/cuda.py",
        "stream.wait_stream(torch.cuda.current_stream(stream.device))",
        "pass",
        ENGINE,
    ),
    Mutant("pykern/runtime/gpu/cuda.py", "            set_stream()\n", "", ENGINE),
    Mutant("pykern/runtime/gpu/cuda.py", "for stream in before:", "for stream in ():", ENGINE),
    Mutant(
        "pykern/runtime/gpu/streams.py",
        "self._read_in_the_end(batch), torch.autograd.set_multithreading_enabled(False)",
        "self._read_in_the_end(batch)",
        ENGINE,
    ),
)
