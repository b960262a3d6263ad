// An operation that a replay of a graph runs again, and the tensors of the host that it is run on.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <span>
#include <utility>

namespace oracle {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

inline Tensor with_storage(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                           c10::DispatchKeySet(key), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                      like.storage_offset());
    return made;
}

// A tensor of the host over memory that others hold.
inline Tensor over(void* data, std::size_t bytes, const Tensor& like) {
    const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                               c10::DataPtr(data, c10::kCPU), c10::GetAllocator(c10::kCPU),
                               /*resizable=*/true);
    return with_storage(storage, like, c10::DispatchKey::CPU);
}

// The same memory for the host.
inline Tensor on_host(const Tensor& tensor) {
    const c10::Storage& its = tensor.storage();
    return over(its.mutable_data(), its.nbytes(), tensor);
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

// An operation that a replay runs: with the values that its arguments have then, its results go to
// where the capture had them. A tensor of the host, which is a number, is as it was.
class Replayed {
   public:
    Replayed(const c10::OperatorHandle& op, Stack arguments, std::span<const IValue> results)
        : op_(op), arguments_(std::move(arguments)) {
        for (IValue& value : arguments_) value = mapped(value, &fixed);
        for (const IValue& value : results) {
            results_.push_back(mapped(value, &fixed));
        }
    }

    void operator()() const {
        const at::AutoDispatchBelowADInplaceOrView no_autograd;
        // They were given when the call was captured.
        Quiet quiet;
        const c10::WarningUtils::WarningHandlerGuard without_warnings(&quiet);
        Stack stack = arguments_;
        op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
        for (std::size_t i = 0; i < results_.size(); ++i) put(stack[i], results_[i]);
    }

   private:
    struct Quiet final : c10::WarningHandler {
        void process(const c10::Warning&) override {}
    };
    static Tensor fixed(const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        return tensor.is_cuda() ? on_host(tensor) : tensor.clone();
    }
    static void put(const IValue& value, const IValue& place) {
        if (value.isTensorList()) {
            const auto values = value.toTensorVector();
            const auto places = place.toTensorVector();
            for (std::size_t i = 0; i < values.size(); ++i) put(values[i], places[i]);
        } else if (value.isTensor() && value.toTensor().defined()) {
            const Tensor& made = value.toTensor();
            const Tensor into = place.toTensor();
            if (made.const_data_ptr() != into.const_data_ptr()) into.copy_(made);
        }
    }

    c10::OperatorHandle op_;
    Stack arguments_;
    Stack results_;
};

}  // namespace oracle
