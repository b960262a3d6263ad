"""Faults in the order of streams, its events, its waits and its graphs."""

from .mutant import Mutant

ORDER = (
    "test_dispatch.cpp",
    "test_stream_order.cpp",
    "test_step_graph.cpp",
    "test_streams.cpp",
)

OF_EXEC = (
    Mutant(
        "csrc/exec/stream_order.cpp",
        "edges.push_back({.from = node - 1, .to = node});",
        "continue;",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "edges.push_back({.from = last[number], .to = node});",
        "",
        ORDER,
        harmless="Each copy waits for its own source and slot, so a stream may have any order.",
    ),
    Mutant(
        "csrc/exec/stream_order.cpp", "edges.push_back({.from = source, .to = node});", "", ORDER
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "if (copy.freed_by) edges.push_back({.from = node_of(*copy.freed_by), .to = node});",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/stream_order.cpp", "if (forward) bringer = forward_copy_[from];", "", ORDER),
    Mutant(
        "csrc/exec/stream_order.cpp", "if (backward) bringer = backward_copy_[from];", "", ORDER
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "(action.kind == Kind::B || action.kind == Kind::I) &&",
        "action.kind == Kind::B &&",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "if (ring[slot] != kNone) add_handover(ring[slot], node);",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/stream_order.cpp", "            ring[slot] = node;\n", "", ORDER),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "edges.push_back({.from = forward_copy_[former], .to = next});",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "if (copy != kNone) edges.push_back({.from = copy, .to = next});",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "{Kind::B, Kind::I}) {\n            Action action = nodes[former].action;",
        "{Kind::B}) {\n            Action action = nodes[former].action;",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp", "if (index_.at(source) < 0) source.kind = Kind::I;", "", ORDER
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "static_cast<std::size_t>(replica) * num_stages + action.stage",
        "static_cast<std::size_t>(action.stage)",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "std::ranges::sort(inputs, std::greater<>());",
        "",
        ORDER,
        harmless="A task may then wait for more than it needs, and never for less.",
    ),
    Mutant("csrc/exec/stream_order.cpp", "if (clock[from] < place_[input]) {", "{", ORDER),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "clock[from] < place_[input]",
        "clock[from] + 1 < place_[input]",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "clock[i] = std::max(clock[i], at_end_[input][i]);",
        "clock[i] = at_end_[input][i];",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "if (--num_waiters_[input] == 0) at_end_[input] = {};",
        "",
        ORDER,
        harmless="It gives memory back, which nothing reads any more.",
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "place_[task] = ++clock[static_cast<std::size_t>(stream)];",
        "place_[task] = clock[static_cast<std::size_t>(stream)]++;",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "if (tasks_[from].stream == tasks_[to].stream) continue;",
        "",
        ORDER,
        harmless="The next step leaves out waits on a task's own stream too.",
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "for (const TaskNumber task : waits_) tasks_[task].awaited = true;",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_order.cpp",
        "static_cast<std::size_t>(stream - num_devices())].sender;",
        "static_cast<std::size_t>(stream - num_devices())].receiver;",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp", "carriers_[task] = copy;", "static_cast<void>(copy);", ORDER
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        "start_.emplace(gpu, cuda::make_event(primary.get(),",
        "start_.emplace(gpu, cuda::make_event(lanes_->primary(0),",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        "lane_start_.push_back(cuda::make_event(context,",
        "lane_start_.push_back(cuda::make_event(lanes_->primary(lane),",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        ".end = make_event(sender),",
        ".end = make_event(receiver),",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        ".half = make_event(sender),",
        ".half = make_event(receiver),",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        ".landed = make_event(receiver)}",
        ".landed = make_event(sender)}",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        ".landing = take_stream(receiver),",
        ".landing = take_stream(sender),",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        "if (!lanes_->reaches(sender, receiver)) {",
        "if (sender == receiver) {",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        "cuda::make_event(context_of(task.stream), cuda::kEventDisableTiming)",
        "cuda::make_event(lanes_->primary(0), cuda::kEventDisableTiming)",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        "? lanes_->compute_context(stream)",
        "? lanes_->primary(stream)",
        ORDER,
    ),
    Mutant("csrc/exec/stream_job.cpp", "cuda::driver::cuCtxSetCurrent(primary.get());", "", ORDER),
    Mutant("csrc/exec/stream_job.cpp", "callers.at(gpu));", "callers.begin()->second);", ORDER),
    Mutant(
        "csrc/exec/stream_job.cpp",
        "launches_[task] = std::move(launch);\n    ++version_;",
        "launches_[task] = std::move(launch);",
        ORDER,
    ),
    Mutant(
        "csrc/exec/stream_job.cpp",
        "transfers_[copy] = std::move(transfers);\n    ++version_;",
        "transfers_[copy] = std::move(transfers);",
        ORDER,
    ),
    Mutant("csrc/exec/streams.cpp", "wait(landing, lane.by_host->half.get());", "", ORDER),
    Mutant(
        "csrc/exec/streams.cpp",
        "driver::cuEventRecord(lane.by_host->half.get(), stream);",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/streams.cpp", "wait(stream, lane.by_host->landed.get());", "", ORDER),
    Mutant(
        "csrc/exec/streams.cpp",
        "driver::cuEventRecord(lane.by_host->landed.get(), landing);",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/streams.cpp",
        "wait(lanes.compute(lane), job_.start(lanes.gpu_of(lane)));",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/streams.cpp",
        "driver::cuEventRecord(job_.lane_start(lane), lanes.compute(lane));",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/streams.cpp", "wait(stream, job_.lane_start(ends.sender));", "", ORDER),
    Mutant("csrc/exec/streams.cpp", "wait(stream, job_.lane_start(ends.receiver));", "", ORDER),
    Mutant(
        "csrc/exec/streams.cpp",
        "for (const TaskNumber input : order_.waits(number)) wait(stream, job_.done(input));",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/streams.cpp",
        "if (task.awaited) driver::cuEventRecord(job_.done(number), stream);",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/streams.cpp",
        "enter(job_.lanes().primary(order_.device_of_stream(task.stream)), current);",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/streams.cpp", "launch && replay_", "launch", ORDER),
    Mutant("csrc/exec/streams.cpp", "        move_on(stream, launch->before);\n", "", ORDER),
    Mutant("csrc/exec/streams.cpp", "        move_on(stream, launch->after);\n", "", ORDER),
    Mutant("csrc/exec/streams.cpp", "    driver::cuCtxGetCurrent(&current);\n", "", ORDER),
    Mutant(
        "csrc/exec/streams.cpp",
        "if (carrier != StreamJob::kNoTask) given_[carrier] = std::move(transfers);",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/streams.cpp",
        "wait(lanes.compute(order_.copy_streams()[i].sender), copies.end.get());",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/streams.cpp",
        "driver::cuEventRecord(copies.end.get(), copies.stream.get());",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/streams.cpp",
        "driver::cuEventRecord(job_.lane_end(lane), lanes.compute(lane));",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/streams.cpp", "        enter(lanes.primary(lane), current);\n", "", ORDER),
    Mutant(
        "csrc/exec/streams.cpp",
        "wait(callers_.at(lanes.gpu_of(lane)), job_.lane_end(lane));",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "after_.erase(std::ranges::unique(after_).begin(), after_.end());",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/step_graph.cpp", "    chain.add(launch->before, context);\n", "", ORDER),
    Mutant("csrc/exec/step_graph.cpp", "    chain.add(launch->after, context);\n", "", ORDER),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "landed.insert(landed.end(), chain.end().begin(), chain.end().end());",
        "landed = chain.end();",
        ORDER,
    ),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "if (!landed.empty()) chain = Chain(graph, std::move(landed));",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "after.insert(after.end(), end_of_task[input].begin(), end_of_task[input].end());",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/step_graph.cpp", "Nodes after = end;", "Nodes after;", ORDER),
    Mutant("csrc/exec/step_graph.cpp", "        end = chain.end();\n", "", ORDER),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "if (task.awaited) end_of_task[number] = chain.end();",
        "",
        ORDER,
    ),
    Mutant("csrc/exec/step_graph.cpp", "    job_.record_start(callers);\n", "", ORDER),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "driver::cuStreamWaitEvent(stream, job_.start(gpu), 0);",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/step_graph.cpp", "driver::cuEventRecord(job_.lane_end(0), stream);", "", ORDER
    ),
    Mutant(
        "csrc/exec/step_graph.cpp", "        driver::cuCtxSetCurrent(primary.get());\n", "", ORDER
    ),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "driver::cuStreamWaitEvent(callers.at(gpu), job_.lane_end(0), 0);",
        "",
        ORDER,
    ),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "current(job_.lanes().primary(0));\n        drain();",
        "current(job_.lanes().primary(0));",
        ORDER,
    ),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "        } else {\n            drain();\n        }\n        throw;",
        "        }\n        throw;",
        ORDER,
    ),
    Mutant(
        "csrc/exec/step_graph.cpp",
        "driver::cuGraphUpload(exec.get(), job.lanes().compute(0));",
        "",
        ORDER,
    ),
)
