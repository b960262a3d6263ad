// How a call comes in: one at a time, counted, failing where a test says so.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "driver_model/model.hpp"

namespace pykern::fake {

// The driver's functions, to be looked up by cuGetProcAddress_v2 only.
using namespace cuda;  // NOLINT(google-build-using-namespace)
#define PYKERN_FAKE_DECLARE(name, version, parameters) CUresult name parameters;
PYKERN_CUDA_FUNCTIONS(PYKERN_FAKE_DECLARE)
#undef PYKERN_FAKE_DECLARE

// One for the process. The lock is recursive because what work runs may free memory.
struct World {
    std::recursive_mutex mutex;
    std::unique_ptr<Model> model = std::make_unique<Model>(1, 0);
    int driver_version = 13000;
    bool initialised = false;
};
World& world();

// A function of the driver, or the end of the call.
void* known_function(Model& model, const char* name);

// A call that gives something back is done even if it fails, as the driver's are, which then tell
// of an earlier error. A call that issues work must not come after the context is lost.
enum class Call : std::uint8_t { kPlain, kWork, kRelease };

// The function's name while it runs.
class Entered {
   public:
    Entered(Model& model, const char* function)
        : model_(model), former_(model.violations.enter(function)) {}
    ~Entered() { model_.violations.enter(former_); }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;
    Entered(Entered&&) = delete;
    Entered& operator=(Entered&&) = delete;

   private:
    Model& model_;
    const char* former_;
};

template <class Body>
CUresult attempt(Model& model, const Body& body) {
    try {
        return body(model);
    } catch (const Refused& refused) {
        return refused.error();
    }
}

template <class Body>
CUresult call(const char* function, Call kind, const Body& body) {
    const std::scoped_lock lock(world().mutex);
    Model& model = *world().model;
    const Entered entered(model, function);
    const CUresult lost = model.faults.sticky();
    const CUresult fault = model.faults.next(function);
    if (lost != kSuccess && kind == Call::kWork)
        model.violations.add("work after the context was lost");
    if (model.faults.sticky() != lost) model.drop_work();
    if (fault != kSuccess && kind != Call::kRelease) return fault;
    if (!world().initialised) return kNotInitialized;
    const CUresult result = attempt(model, body);
    model.schedule.run_some();
    return fault != kSuccess ? fault : result;
}

// Never fails and counts as no call; a wrong argument is told as a violation.
template <class Body>
auto tell(const char* function, const Body& body) -> decltype(body(std::declval<Model&>())) {
    const std::scoped_lock lock(world().mutex);
    Model& model = *world().model;
    const Entered entered(model, function);
    try {
        return body(model);
    } catch (const Refused&) {
        return decltype(body(model))();
    }
}

}  // namespace pykern::fake
