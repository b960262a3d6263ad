// Calls by which a program tells and asks the model: see fake.hpp.
#include <memory>
#include <utility>

#include "driver_model/entry.hpp"

using namespace pykern;  // NOLINT(google-build-using-namespace)
using fake::Model;
using fake::tell;

void fake_reset(int num_devices, std::uint64_t seed) {
    const std::scoped_lock lock(fake::world().mutex);
    fake::world().model = std::make_unique<Model>(num_devices, seed);
    fake::world().driver_version = 13000;
}

void fake_set_peer(int device, int peer, int reachable) {
    tell("fake_set_peer", [&](Model& model) {
        model.device(device);
        model.device(peer);
        if (reachable != 0) {
            model.unreachable.erase({device, peer});
        } else {
            model.unreachable.emplace(device, peer);
        }
    });
}

void fake_allow_undeclared(int allowed) {
    tell("fake_allow_undeclared",
         [&](Model& model) { model.memory.allow_undeclared(allowed != 0); });
}

void fake_kernel(cuda::CUstream stream, double duration_ns, const FakeAccess* accesses,
                 std::size_t num_accesses) {
    tell("fake_kernel", [&](Model& model) {
        fake::Work work;
        work.accesses.assign(accesses, accesses + num_accesses);
        model.issue(model.stream(stream), std::move(work), duration_ns);
        model.schedule.run_some();
    });
}

void fake_run_all() {
    tell("fake_run_all", [](Model& model) { model.schedule.run_all(); });
}

void fake_begin_step() {
    tell("fake_begin_step", [](Model& model) { ++model.step; });
}

int fake_violations() {
    return tell("fake_violations", [](Model& model) {
        model.lent.check();
        return static_cast<int>(model.violations.texts().size());
    });
}

const char* fake_violation(int index) {
    static std::string text;
    return tell("fake_violation", [&](Model& model) {
        text = model.violations.texts().at(static_cast<std::size_t>(index));
        return text.c_str();
    });
}

std::uint64_t fake_calls(const char* function) {
    return tell("fake_calls", [&](Model& model) {
        fake::known_function(model, function);
        return model.faults.calls(function);
    });
}
