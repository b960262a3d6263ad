// A CUDA driver that passes every call on to another one, and writes it down.
//
// A line is: the thread's number, the function, the arguments, "=", the result. An object is
// KIND@ADDRESS, with a star before it where the call has told it; names.py has names for them.
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>

#include "cuda/driver.hpp"

namespace {

using namespace pykern::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))

// The driver behind, and what was written.
Api behind;
std::mutex mutex;
std::string text;
std::string taken;
std::map<std::thread::id, std::size_t> threads;

void append(const std::string& line) {
    const std::scoped_lock lock(mutex);
    const auto number = threads.try_emplace(std::this_thread::get_id(), threads.size() + 1).first;
    text += std::to_string(number->second) + " " + line + "\n";
}

const char* kind_of(CUcontext) { return "ctx"; }
const char* kind_of(CUstream) { return "stream"; }
const char* kind_of(CUevent) { return "event"; }
const char* kind_of(CUgraph) { return "graph"; }
const char* kind_of(CUgraphNode) { return "node"; }
const char* kind_of(CUgraphExec) { return "exec"; }
const char* kind_of(CUgreenCtx) { return "green"; }
const char* kind_of(CUdevResourceDesc) { return "description"; }

template <class Tag>
std::string named(Tag* handle) {
    std::ostringstream out;
    out << kind_of(handle) << '@' << std::hex << reinterpret_cast<std::uintptr_t>(handle);
    return out.str();
}

// Flags have the type of an address; no address is as small.
std::string address(CUdeviceptr value) {
    constexpr CUdeviceptr kLeastAddress = 4096;
    std::ostringstream out;
    if (value < kLeastAddress) {
        out << value;
    } else {
        out << "buffer@" << std::hex << value;
    }
    return out.str();
}

class Line {
   public:
    explicit Line(const char* function) { out_ << function; }

    // Called before the driver, for what it reads and overwrites.
    void before(const int* value) { before_ = *value; }
    template <class Other>
    void before(Other /*argument*/) {}

    // Called behind it, in the order of the arguments.
    template <class Tag>
    void add(Tag* handle)
        requires requires { kind_of(handle); }
    {
        out_ << ' ' << named(handle);
    }
    template <class Tag>
    void add(Tag** told) {
        out_ << " *" << named(*told);
    }
    void add(const CUgraphNode* nodes) {
        nodes_ = nodes;
        lists_ = true;
    }
    void add(std::size_t number) {
        if (!lists_) {
            out_ << ' ' << number;
            return;
        }
        out_ << " (";
        for (std::size_t i = 0; i < number; ++i) out_ << (i == 0 ? "" : ",") << named(nodes_[i]);
        out_ << ')';
        lists_ = false;
    }
    void add(CUdeviceptr value) { out_ << ' ' << address(value); }
    void add(int value) { out_ << ' ' << value; }
    void add(unsigned value) { out_ << ' ' << value; }
    void add(const int* value) { out_ << ' ' << before_ << '>' << *value; }
    void add(const float* value) { out_ << " ~" << *value; }
    void add(const Memcpy3D* copy) {
        out_ << " copy(" << address(copy->dstDevice) << ',' << address(copy->srcDevice) << ','
             << copy->WidthInBytes << ')';
    }
    void add(const char* /*text*/) { out_ << " text"; }
    void add(const char** /*text*/) { out_ << " text"; }
    // Groups of multiprocessors: a log has them by their functions alone.
    void add(const DevResource* /*resource*/) { out_ << " resource"; }
    void add(const unsigned* /*number*/) { out_ << " number"; }

    std::string ended(CUresult result) {
        out_ << " = " << result;
        return out_.str();
    }

   private:
    std::ostringstream out_;
    int before_ = 0;
    // Nodes whose number is the next argument.
    const CUgraphNode* nodes_ = nullptr;
    bool lists_ = false;
};

enum Number : std::uint8_t {
#define NUMBER(name, version, parameters) kNumberOf_##name,
    PYKERN_CUDA_FUNCTIONS(NUMBER)
#undef NUMBER
};

const auto kNames = std::to_array<const char*>({
#define NAME(name, version, parameters) #name,
    PYKERN_CUDA_FUNCTIONS(NAME)
#undef NAME
});

template <auto function, Number number>
struct Passed;
template <class... Parameters, CUresult (*Api::*function)(Parameters...), Number number>
struct Passed<function, number> {
    static void* here() {
        return behind.*function == nullptr ? nullptr : reinterpret_cast<void*>(&call);
    }
    static CUresult call(Parameters... arguments) {
        Line line(kNames[number]);
        (line.before(arguments), ...);
        const CUresult result = (behind.*function)(arguments...);
        (line.add(arguments), ...);
        append(line.ended(result));
        return result;
    }
};

}  // namespace

// Knows the functions that the driver behind has, and no others.
EXPORT CUresult cuGetProcAddress_v2(const char* name, void** function, int, std::uint64_t, int*) {
    *function = nullptr;
#define FIND(its, version, parameters)                          \
    if (std::strcmp(name, #its) == 0) {                         \
        *function = Passed<&Api::its, kNumberOf_##its>::here(); \
    }
    PYKERN_CUDA_FUNCTIONS(FIND)
#undef FIND
    return *function == nullptr ? kInvalidValue : kSuccess;
}

// Begins anew, in front of this driver. Returns why it cannot, or null.
EXPORT const char* recorder_open(const char* library) {
    static std::string why;
    try {
        behind = load(library);
    } catch (const DriverMissing& missing) {
        why = missing.what();
        return why.c_str();
    }
    const std::scoped_lock lock(mutex);
    text.clear();
    threads.clear();
    return nullptr;
}

EXPORT void recorder_add(const char* line) { append(line); }

// All that was written; lives until the next call.
EXPORT const char* recorder_text() {
    const std::scoped_lock lock(mutex);
    taken = text;
    return taken.c_str();
}
