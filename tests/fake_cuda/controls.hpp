// Calls by which tests alone tell and ask the fake driver. The library of the tests has them,
// beside those of driver_model/fake.hpp; the library of the package has not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver_model/fake.hpp"

extern "C" {

// A function of the driver by its name, null if it does not exist: for tests without the loader.
PYKERN_FAKE_EXPORT void* fake_function(const char* name);

// From here on handle 0 stands for this stream wherever its context is current, as for torch's
// default stream.
PYKERN_FAKE_EXPORT void fake_make_default(pykern::cuda::CUstream stream);

// How much work runs by itself after each call: 0 as late as possible, 1 as early as possible.
PYKERN_FAKE_EXPORT void fake_set_eagerness(double probability);
// Copies that a device writes to the memory of a peer lose their last byte, and nothing tells, as
// on boards whose driver says that they reach each other. By way of the host they arrive.
PYKERN_FAKE_EXPORT void fake_set_corrupt(int device, int peer, int corrupt);
PYKERN_FAKE_EXPORT void fake_set_copy_cost(double latency_ns, double bytes_per_ns);
// The functions that came with a later release are not there. At first it is 13000.
PYKERN_FAKE_EXPORT void fake_set_driver_version(int version);

// Memory that belongs to a stream, as with torch's allocator, which may hand it out again at once
// for that stream's later work: so what other streams did with it must be ordered before.
PYKERN_FAKE_EXPORT void fake_alloc(pykern::cuda::CUdeviceptr address, std::size_t bytes,
                                   pykern::cuda::CUstream owner);
// For memory given to fake_alloc: it is memory of the host. If it is pinned, every device reaches
// it. Otherwise cuMemcpyAsync makes the host wait for the stream: when the call ends, bytes to such
// memory are there, and bytes from it have been read.
PYKERN_FAKE_EXPORT void fake_place_on_host(pykern::cuda::CUdeviceptr address, int pinned);
// Bytes of the host that the last work of a stream reads: the host may not change them before it
// knows that the work is done.
PYKERN_FAKE_EXPORT void fake_lend(pykern::cuda::CUstream stream, pykern::cuda::CUdeviceptr address,
                                  std::size_t bytes);
// To be called while the bytes are still there: work that touches them is run first.
PYKERN_FAKE_EXPORT void fake_free(pykern::cuda::CUdeviceptr address);
// Forgets memory that was freed: its bytes are really gone, and the address may come back as any
// other.
PYKERN_FAKE_EXPORT void fake_forget(pykern::cuda::CUdeviceptr address);

// As fake_kernel, by a call of this thread, whose current context must be of the stream's device.
PYKERN_FAKE_EXPORT void fake_launch(pykern::cuda::CUstream stream, double duration_ns,
                                    const FakeAccess* accesses, std::size_t num_accesses);
// Work issued to `after` from here on comes after the work that `before` holds by now: what torch
// does by an event, and what no test lets fail.
PYKERN_FAKE_EXPORT void fake_order(pykern::cuda::CUstream before, pykern::cuda::CUstream after);
// Runs what is needed to have all done that is on the stream by now. It orders nothing. Returns 0
// where work that hangs is in the way.
PYKERN_FAKE_EXPORT int fake_complete(pykern::cuda::CUstream stream);
// From here on, all that decides who comes before whom is kept as text: see log.hpp. The text lives
// until the next call.
PYKERN_FAKE_EXPORT void fake_keep_log(int kept);
PYKERN_FAKE_EXPORT const char* fake_log();

// The result of capturing a stream: a graph of one node that calls run(argument), which must not
// call the driver, and touches what fake_graph_access adds.
PYKERN_FAKE_EXPORT pykern::cuda::CUgraph fake_make_graph(double duration_ns, void (*run)(void*),
                                                         void* argument);
PYKERN_FAKE_EXPORT void fake_graph_access(pykern::cuda::CUgraph graph,
                                          pykern::cuda::CUdeviceptr address, std::size_t bytes,
                                          int writes);
// Adds a node to a graph, after earlier ones of the graph by their number; returns its number.
PYKERN_FAKE_EXPORT std::size_t fake_add_node(pykern::cuda::CUgraph graph, double duration_ns,
                                             void (*run)(void*), void* argument,
                                             const FakeAccess* accesses, std::size_t num_accesses,
                                             const std::size_t* after, std::size_t num_after);
// A graph of one node that fills what it writes with a hash of the salt and of what it reads.
PYKERN_FAKE_EXPORT pykern::cuda::CUgraph fake_make_mix_graph(double duration_ns, std::uint64_t salt,
                                                             const FakeAccess* accesses,
                                                             std::size_t num_accesses);

// From now on, the nth call (1 is the next) of a function fails with this error. If it is sticky,
// so does every later call of any function, and work that is under way is lost.
PYKERN_FAKE_EXPORT void fake_fail(const char* function, int nth, int error, int sticky);

// From now on, the nth wait of a stream for an event (1 is the next) is left out: so tests see
// whether they would have noticed that it is missing.
PYKERN_FAKE_EXPORT void fake_drop_wait(int nth);

// From now on, the work that a function issues as the nth hangs (1 is the next): cuMemcpyAsync,
// cuStreamWaitEvent, cuGraphLaunch with a node for each, or fake_kernel. A host that would wait for
// it is told as a violation, and does not wait.
PYKERN_FAKE_EXPORT void fake_hang(const char* function, int nth);
// In the next graph that is launched, the nth node that does work hangs (1 is the first that was
// added), and all behind it wait; the others run.
PYKERN_FAKE_EXPORT void fake_hang_node(int nth);
// Work that hangs goes on; or it never runs any more, nor does any other work under way.
PYKERN_FAKE_EXPORT void fake_let_go(int runs);
// Another thread captures a stream, in the mode in which unsafe calls of other threads break it:
// waits for streams and events, looks at events, copies of memory that is not pinned. Threads in
// relaxed mode may call them. A wait for the whole context breaks the capture in any mode.
PYKERN_FAKE_EXPORT void fake_set_capturing(int capturing);
// This thread captures a stream, in the mode in which only its own unsafe calls break the capture;
// or no thread does so any more.
PYKERN_FAKE_EXPORT void fake_set_capturing_alone(int capturing);
// An unsafe call of another library by this thread, such as an allocation of memory, or the load of
// a module when its first kernel is launched. Returns 0 where it breaks a capture.
PYKERN_FAKE_EXPORT int fake_unsafe(const char* function);
// The most work that may wait in the queue of a stream, 1,024 at first. A call that issues more
// makes the host wait for room, and learns nothing by that. Behind work that hangs there is never
// room: the call is told as a violation, and ends.
PYKERN_FAKE_EXPORT void fake_set_queue(std::size_t most);
// Until the next reset, new objects get the handles of removed ones, as from the driver. Handles
// that are never used twice show more mistakes, but not that of taking one object for another.
PYKERN_FAKE_EXPORT void fake_reuse_handles();

// The multiprocessors for work of the stream: the first of them; their number.
PYKERN_FAKE_EXPORT unsigned fake_first_multiprocessor(pykern::cuda::CUstream stream);
PYKERN_FAKE_EXPORT unsigned fake_num_multiprocessors(pykern::cuda::CUstream stream);

// Forgets the violations so far: for a program that only asks whether the driver would refuse.
PYKERN_FAKE_EXPORT void fake_forgive();
// Live objects that no function of tests made, a line for each; empty if nothing lives. The text
// lives until the next call.
PYKERN_FAKE_EXPORT const char* fake_leaks();
// Copies between devices of which the stream's has no access to the other.
PYKERN_FAKE_EXPORT std::uint64_t fake_staged_copies();
// Copies of memory that is not pinned, for which the host has waited.
PYKERN_FAKE_EXPORT std::uint64_t fake_pageable_copies();
// Calls that had to wait for room in a queue.
PYKERN_FAKE_EXPORT std::uint64_t fake_full_queues();
}
