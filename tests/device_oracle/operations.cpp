// Every operation on tensors of GPUs: the CPU's computes it, and the fake driver is told of it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "guard.hpp"
#include "host.hpp"
#include "overriding.hpp"
#include "replayed.hpp"
#include "storage.hpp"

namespace oracle {
namespace {

Access extent(const Tensor& tensor, bool writes) {
    if (tensor.numel() == 0) return {0, 0, writes};
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return {reinterpret_cast<unsigned long long>(tensor.const_data_ptr()),
            static_cast<std::size_t>(last + 1) * tensor.element_size(), writes};
}

bool share(const Tensor& one, const Tensor& other) {
    return one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
}

// One call of an operation. Within a capture it is computed for the shapes of its results alone,
// from zeros: it neither reads nor writes what the GPU has.
class Call {
   public:
    Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), stack_(stack) {
        look();
        require_one_device();
        stream_ = current_stream(runs_on_);
        is_captured_ = if_captured(stream_, [this](Capture& capture) { require_work(capture); });
    }

    void run() {
        if (crosses() && !is_captured_) {
            copy_across();
            return;
        }
        // The values are read once all that the stream waits for is done.
        if (lands_on_) driver.order(current_stream(*lands_on_), stream_);
        if (!is_captured_) driver.complete(stream_);
        const Stack given(arguments().begin(), arguments().end());
        for (IValue& value : arguments()) {
            value = mapped(value, [this](const Tensor& tensor) { return to_host(tensor); });
        }
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
        take_new_sizes();
        for (IValue& value : results()) {
            // A number is one that Python gets.
            host_waits_ = host_waits_ || value.isScalar() || value.isBool();
            value = mapped(value, [this](const Tensor& tensor) { return to_gpu(tensor); });
        }
        if (op_.hasTag(at::Tag::nondeterministic_seeded)) ++counts.draws;
        std::vector<Access> touched = accesses();
        if (!works()) return;
        const auto record = [&](Capture& capture) {
            if (host_waits_) capture.refuse("the host waits for a value");
            capture.add(stream_, std::move(touched), Replayed(op_, given, results()));
        };
        if (!if_captured(stream_, record)) tell(touched);
    }

   private:
    using Span = c10::ArrayRef<IValue>;
    // Indices may be on the host.
    static constexpr std::string_view kIndexes[] = {"aten::index", "aten::index_put_",
                                                    "aten::_index_put_impl_"};
    // They leave memory as it is.
    static constexpr std::string_view kMakes[] = {"aten::empty", "aten::empty_strided"};

    template <std::size_t kNum>
    bool is_one_of(const std::string_view (&names)[kNum]) const {
        return std::ranges::find(names, op_.schema().name()) != std::end(names);
    }
    std::span<IValue> last(std::size_t num) { return std::span(stack_).last(num); }
    std::span<IValue> arguments() { return last(op_.schema().arguments().size()); }
    std::span<IValue> results() { return last(op_.schema().returns().size()); }

    void look() {
        const auto& schema = op_.schema().arguments();
        moves_ = op_.schema().name() == "aten::copy_";
        std::size_t number = 0;
        for (IValue& value : arguments()) {
            const auto* alias = schema[number++].alias_info();
            const bool writes = alias != nullptr && alias->isWrite();
            if (value.isTensor()) add(value.toTensor(), writes);
            if (value.isTensorList()) {
                for (const Tensor& each : value.toTensorVector()) add(each, writes);
            }
            if (value.isOptionalTensorList()) {
                for (const auto& each : value.toOptionalTensorVector()) {
                    if (each) add(*each, writes);
                }
            }
            if (value.isDevice()) {
                const c10::Device device = value.toDevice();
                wanted_ = device.is_cuda() && !device.has_index() ? device_of(gpu) : device;
                value = c10::Device(c10::kCPU);
            }
        }
    }

    // Whether the host has to know values to make the result.
    bool depends_on_values() const {
        const auto is_mask = [](const auto& given) {
            return given.first.scalar_type() == at::kBool;
        };
        return op_.hasTag(at::Tag::dynamic_output_shape) &&
               (!is_one_of(kIndexes) || std::any_of(given_.begin() + 1, given_.end(), is_mask));
    }

    // A copy between a GPU and the host.
    bool crosses() const {
        return moves_ && given_[0].first.is_cuda() != given_[1].first.is_cuda();
    }

    void copy_across() {
        const bool host_waits = !arguments()[2].toBool();
        const Within within(runs_on_);
        host_copy(given_[0].first, given_[1].first, stream_, host_waits);
        torch::jit::drop(stack_, 3);
        torch::jit::push(stack_, given_[0].first);
    }

    void add(const Tensor& tensor, bool writes) {
        if (tensor.defined()) given_.emplace_back(tensor, writes);
    }

    // A move is work of its source's GPU, and both GPUs' streams wait for it.
    void require_one_device() {
        std::optional<int> found;
        bool has_host = false;
        for (const auto& [tensor, writes] : given_) {
            if (!tensor.is_cuda()) {
                has_host = has_host || tensor.dim() > 0;
                continue;
            }
            const int index = tensor.device().index();
            if (moves_ && found && *found != index) lands_on_ = found;
            TORCH_CHECK(moves_ || !found || *found == index,
                        "Expected all tensors to be on the same device, got cuda:", *found,
                        " and cuda:", index, " for ", op_.schema().name());
            found = index;
        }
        TORCH_CHECK(!has_host || !found || moves_ || is_one_of(kIndexes),
                    "Expected all tensors to be on the same device, got cuda:", *found,
                    " and cpu for ", op_.schema().name());
        // Without `non_blocking`, the host has the bytes when it goes on.
        host_waits_ = depends_on_values() ||
                      (moves_ && !given_[0].first.is_cuda() && !arguments()[2].toBool());
        if (!found && wanted_ && wanted_->is_cuda()) found = wanted_->index();
        runs_on_ = found.value_or(gpu);
        makes_on_ = wanted_.value_or(device_of(runs_on_));
    }

    // The driver cannot run these within a graph, or a replay would not do them again.
    void require_work(Capture& capture) const {
        if (lands_on_) capture.refuse("a copy to another GPU");
        for (const auto& [tensor, writes] : given_) {
            if (moves_ && !tensor.is_cuda()) capture.refuse("a copy from or to the host");
            if (!tensor.is_cuda() && tensor.dim() > 0) capture.refuse("indices on the host");
        }
        if (op_.hasTag(at::Tag::nondeterministic_seeded)) capture.refuse("random numbers");
    }

    Tensor to_host(const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) return tensor;
        std::optional<Tensor> shared;
        for (const auto& [on_gpu, host, data] : aliases_) {
            if (on_gpu.is_same(tensor)) return host;
            if (share(on_gpu, tensor)) shared = host;
        }
        Tensor host;
        if (shared) {
            host = with_storage(shared->storage(), tensor, c10::DispatchKey::CPU);
        } else if (is_captured_) {
            const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
            zeros_.push_back(at::zeros({bytes}, at::kByte));
            host = over(zeros_.back().mutable_data_ptr(), tensor.storage().nbytes(), tensor);
        } else {
            host = on_host(tensor);
        }
        aliases_.push_back({tensor, host, host.storage().data()});
        return host;
    }

    // A result that was given may have been given in another size.
    void take_new_sizes() {
        for (const auto& [on_gpu, host, data] : aliases_) {
            if (host.storage().data() != data) {
                auto& storage = *on_gpu.storage().unsafeGetStorageImpl();
                c10::Storage larger = moved(host.storage(), on_gpu.device());
                storage.set_nbytes(larger.nbytes());
                storage.set_data_ptr_noswap(larger.set_data_ptr({nullptr, on_gpu.device()}));
            }
            if (host.sizes() != on_gpu.sizes() || host.strides() != on_gpu.strides()) {
                on_gpu.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                                    host.storage_offset());
            }
        }
    }

    Tensor to_gpu(const Tensor& host) {
        if (!host.defined() || makes_on_.is_cpu()) {
            host_waits_ = host_waits_ || makes_on_.is_cpu();
            return host;
        }
        for (const auto& [tensor, writes] : given_) {
            if (tensor.is_same(host)) return host;
        }
        for (const auto& [on_gpu, alias, data] : aliases_) {
            if (alias.is_same(host)) return on_gpu;
            if (share(alias, host)) {
                return with_storage(on_gpu.storage(), host, c10::DispatchKey::CUDA);
            }
        }
        const Tensor made =
            with_storage(moved(host.storage(), makes_on_), host, c10::DispatchKey::CUDA);
        made_.push_back(made);
        return made;
    }

    // Bytes in memory of a GPU; from a capture, none that mean anything.
    c10::Storage moved(const c10::Storage& host, c10::Device device) const {
        c10::Storage storage = storage_on(device, host.nbytes());
        if (host.nbytes() == 0) return storage;
        if (is_captured_) {
            std::memset(storage.mutable_data(), 0xFF, host.nbytes());
        } else {
            std::memcpy(storage.mutable_data(), host.data(), host.nbytes());
        }
        return storage;
    }

    bool works() const {
        const auto is_written = [](const auto& given) { return given.second; };
        return (host_waits_ || !made_.empty() || std::ranges::any_of(given_, is_written)) &&
               !is_one_of(kMakes);
    }

    std::vector<Access> accesses() const {
        std::vector<Access> touched;
        for (const Tensor& made : made_) touched.push_back(extent(made, true));
        for (const auto& [tensor, writes] : given_) {
            if (tensor.is_cuda()) touched.push_back(extent(tensor, writes));
        }
        std::erase_if(touched, [](const Access& access) { return access.bytes == 0; });
        return touched;
    }

    void tell(const std::vector<Access>& touched) const {
        constexpr double kDurationNs = 1000;
        driver.kernel(stream_, kDurationNs, touched.data(), touched.size());
        ++counts.kernels;
        if (lands_on_) {
            driver.order(stream_, current_stream(*lands_on_));
            ++counts.copies;
        }
        if (host_waits_) {
            ++counts.host_waits;
            const Within within(runs_on_);
            require_success(driver.stream_synchronize(stream_));
        }
    }

    // A tensor of a GPU with its twin on the host, whose bytes were there before the call.
    struct Alias {
        Tensor on_gpu;
        Tensor host;
        const void* data;
    };

    const c10::OperatorHandle& op_;
    Stack& stack_;
    std::vector<std::pair<Tensor, bool>> given_;  // with whether it is written
    std::vector<Alias> aliases_;
    std::vector<Tensor> zeros_;
    std::vector<Tensor> made_;
    std::optional<c10::Device> wanted_;
    c10::Device makes_on_ = c10::kCPU;
    int runs_on_ = 0;
    std::optional<int> lands_on_;
    Handle stream_ = nullptr;
    bool is_captured_ = false;
    bool moves_ = false;
    bool host_waits_ = false;
};

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    // A twin of the host's has no versions to share where results have none.
    const c10::InferenceMode with_versions(false);
    Call(op, *stack).run();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
// Before the kernels below, which it would replace.
const Overriding<&run> overriding;
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    // Its one kernel for all devices asks for the device's own.
    m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run>());
    m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
    m.impl("set_.source_Storage", TORCH_FN(set_whole));
    m.impl("set_.source_Tensor", TORCH_FN(set_to));
    m.impl("resize_", TORCH_FN(resize));
    m.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace
}  // namespace oracle

extern "C" {

void oracle_connect(const oracle::Driver* driver) {
    oracle::install_hooks();
    oracle::driver = *driver;
    oracle::gpu = 0;
    for (auto& stream : oracle::streams) stream = nullptr;
    oracle::captures.now.reset();
    oracle::captures.all.clear();
    oracle::Capture::arguments.clear();
    oracle::failures.texts.clear();
    oracle::blocks.begin_test();
    oracle::pinned.begin_test();
}

int oracle_gpu() { return oracle::gpu; }
void oracle_set_gpu(int gpu) { oracle::gpu = gpu; }
void* oracle_stream(int gpu) { return oracle::streams[gpu]; }
void oracle_set_stream(int gpu, void* stream) { oracle::streams[gpu] = stream; }

std::size_t oracle_bytes(int gpu) { return oracle::blocks.bytes(gpu); }
std::size_t oracle_peak(int gpu) { return oracle::blocks.peak(gpu); }
std::size_t oracle_held(int gpu) { return oracle::blocks.held(gpu); }
std::size_t oracle_limit() { return oracle::blocks.limit(); }
void oracle_set_limit(std::size_t bytes) { oracle::blocks.set_limit(bytes); }
void oracle_empty_cache(int gpu) { oracle::blocks.empty_cache(gpu); }
void oracle_reset_peak(int gpu) { oracle::blocks.reset_peak(gpu); }

// Begins to capture the current stream into an empty graph of the driver's.
void* oracle_capture(void* graph, oracle::Pool pool) {
    using namespace oracle;  // NOLINT(google-build-using-namespace)
    const std::lock_guard hold(captures.lock);
    captures.all.push_back({graph, pool, true, {}});
    blocks.use_pool(pool, 1);
    captures.now.emplace(captures.all.back(), current_stream(gpu), pool);
    ++counts.captures;
    return &captures.all.back();
}
int oracle_is_capturing() {
    return oracle::if_captured(oracle::current_stream(oracle::gpu), [](const auto&) {});
}
void oracle_break_capture() {
    const std::lock_guard hold(oracle::captures.lock);
    if (oracle::captures.now) oracle::captures.now->break_off();
}
// Null, or why it has failed, until the next call.
const char* oracle_end_capture() {
    using namespace oracle;  // NOLINT(google-build-using-namespace)
    static std::string text;
    const std::lock_guard hold(captures.lock);
    const auto why = captures.now->end();
    captures.now.reset();
    text = why.value_or("");
    return why ? text.c_str() : nullptr;
}
bool oracle_capture_is_empty() { return oracle::captures.now->is_empty(); }
void oracle_drop_graph(void* recorded) {
    auto& of = *static_cast<oracle::Recorded*>(recorded);
    of.is_alive = false;
    oracle::blocks.use_pool(of.pool, -1);
}
// Null, or why a replay has failed.
const char* oracle_failure() {
    const std::lock_guard hold(oracle::failures.lock);
    return oracle::failures.texts.empty() ? nullptr : oracle::failures.texts.front().c_str();
}

// In the order of `Counts`, since the process began.
void oracle_counts(std::int64_t* into) {
    const auto& counts = oracle::counts;
    for (const auto* each :
         {&counts.kernels, &counts.copies, &counts.host_copies, &counts.records, &counts.waits,
          &counts.host_waits, &counts.draws, &counts.captures, &counts.captured, &counts.forks,
          &counts.replayed, &counts.blocks_again}) {
        *into++ = *each;
    }
}
}
