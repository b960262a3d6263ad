// Every operation on tensors of GPUs: the CPU's computes it, and the fake driver is told of it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "guard.hpp"
#include "storage.hpp"

namespace oracle {
namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

Access extent(const Tensor& tensor, bool writes) {
    if (tensor.numel() == 0) return {0, 0, writes};
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    return {reinterpret_cast<unsigned long long>(tensor.const_data_ptr()),
            static_cast<std::size_t>(last + 1) * tensor.element_size(), writes};
}

Tensor with_storage(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                           c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
    return made;
}

bool share(const Tensor& one, const Tensor& other) {
    return one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
}

// The value with other tensors in the place of its own.
template <class Map>
IValue mapped(const IValue& value, Map map) {
    if (value.isTensor()) return map(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : value.toTensorVector()) list.push_back(map(each));
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const auto& each : value.toOptionalTensorVector()) {
            list.push_back(each ? std::optional(map(*each)) : std::nullopt);
        }
        return list;
    }
    return value;
}

// One call of an operation.
class Call {
   public:
    Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), stack_(stack) {
        look();
        require_one_device();
    }

    void run() {
        const Handle stream = current_stream(runs_on_);
        // The values are read once all that the stream waits for is done.
        if (lands_on_) driver.order(current_stream(*lands_on_), stream);
        driver.complete(stream);
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
        tell(stream);
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
        host_waits_ = moves_ && !given_[0].first.is_cuda() && !arguments()[2].toBool();
        if (!found && wanted_ && wanted_->is_cuda()) found = wanted_->index();
        runs_on_ = found.value_or(gpu);
        makes_on_ = wanted_.value_or(device_of(runs_on_));
    }

    Tensor to_host(const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) return tensor;
        c10::Storage storage;
        for (const auto& [on_gpu, host] : aliases_) {
            if (on_gpu.is_same(tensor)) return host;
            if (share(on_gpu, tensor)) storage = host.storage();
        }
        if (!storage) {
            const c10::Storage& its = tensor.storage();
            storage = c10::Storage(c10::Storage::use_byte_size_t(), its.nbytes(),
                                   c10::DataPtr(its.mutable_data(), c10::kCPU),
                                   c10::GetAllocator(c10::kCPU), /*resizable=*/true);
        }
        const Tensor host = with_storage(storage, tensor, c10::DispatchKey::CPU);
        aliases_.emplace_back(tensor, host);
        return host;
    }

    // A result that was given may have been given in another size.
    void take_new_sizes() {
        for (const auto& [on_gpu, host] : aliases_) {
            auto& storage = *on_gpu.storage().unsafeGetStorageImpl();
            if (host.storage().data() != storage.data()) {
                kept.add(host);
                storage.set_data_ptr_noswap(
                    c10::DataPtr(host.storage().mutable_data(), on_gpu.device()));
                storage.set_nbytes(host.storage().nbytes());
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
        for (const auto& [on_gpu, alias] : aliases_) {
            if (alias.is_same(host)) return on_gpu;
            if (share(alias, host)) {
                return with_storage(on_gpu.storage(), host, c10::DispatchKey::CUDA);
            }
        }
        kept.add(host);
        const c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(),
                                   c10::DataPtr(host.storage().mutable_data(), makes_on_), nullptr,
                                   /*resizable=*/false);
        const Tensor made = with_storage(storage, host, c10::DispatchKey::CUDA);
        made_.push_back(made);
        return made;
    }

    void tell(Handle stream) {
        std::vector<Access> touched;
        for (const Tensor& made : made_) touched.push_back(extent(made, true));
        bool works = host_waits_ || !made_.empty();
        for (const auto& [tensor, writes] : given_) {
            if (tensor.is_cuda()) touched.push_back(extent(tensor, writes));
            works = works || writes;
        }
        if (!works || is_one_of(kMakes)) return;
        std::erase_if(touched, [](const Access& access) { return access.bytes == 0; });
        constexpr double kDurationNs = 1000;
        driver.kernel(stream, kDurationNs, touched.data(), touched.size());
        ++counts.kernels;
        if (lands_on_) {
            driver.order(stream, current_stream(*lands_on_));
            ++counts.copies;
        }
        if (host_waits_) {
            driver.complete(stream);
            ++counts.host_waits;
        }
    }

    const c10::OperatorHandle& op_;
    Stack& stack_;
    std::vector<std::pair<Tensor, bool>> given_;      // with whether it is written
    std::vector<std::pair<Tensor, Tensor>> aliases_;  // of GPUs, each with its twin on the host
    std::vector<Tensor> made_;
    std::optional<c10::Device> wanted_;
    c10::Device makes_on_ = c10::kCPU;
    int runs_on_ = 0;
    std::optional<int> lands_on_;
    bool moves_ = false;
    bool host_waits_ = false;
};

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    // A twin of the host's has no versions to share where results have none.
    const c10::InferenceMode with_versions(false);
    Call(op, *stack).run();
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    // Its one kernel for all devices asks for the device's own.
    m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace
}  // namespace oracle

extern "C" {

void oracle_connect(const oracle::Driver* driver) {
    oracle::install_hooks();
    oracle::driver = *driver;
    oracle::gpu = 0;
    for (auto& stream : oracle::streams) stream = nullptr;
    oracle::kept.clear();
}

int oracle_gpu() { return oracle::gpu; }
void oracle_set_gpu(int gpu) { oracle::gpu = gpu; }
void* oracle_stream(int gpu) { return oracle::streams[gpu]; }
void oracle_set_stream(int gpu, void* stream) { oracle::streams[gpu] = stream; }

// Kernels, copies between GPUs, records, waits, and waits of the host, since the process began.
void oracle_counts(std::int64_t* into) {
    const auto& counts = oracle::counts;
    for (const auto* each :
         {&counts.kernels, &counts.copies, &counts.records, &counts.waits, &counts.host_waits}) {
        *into++ = *each;
    }
}
}
