// Operations that touch no values: they say which memory a tensor has.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <utility>

#include "guard.hpp"

namespace oracle {

inline at::Tensor& set_part(at::Tensor& self, c10::Storage source, std::int64_t offset,
                            at::IntArrayRef sizes, at::IntArrayRef strides) {
    auto& impl = *self.unsafeGetTensorImpl();
    impl.set_storage_keep_dtype(std::move(source));
    impl.set_storage_offset(offset);
    if (strides.empty()) {
        impl.set_sizes_contiguous(sizes);
    } else {
        impl.set_sizes_and_strides(sizes, strides);
    }
    return self;
}

inline at::Tensor& set_whole(at::Tensor& self, c10::Storage source) {
    const auto size = static_cast<std::int64_t>(source.nbytes() / self.element_size());
    return set_part(self, std::move(source), 0, {size}, {});
}

inline at::Tensor& set_to(at::Tensor& self, const at::Tensor& source) {
    return set_part(self, source.storage(), source.storage_offset(), source.sizes(),
                    source.strides());
}

inline const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                                std::optional<at::MemoryFormat>) {
    auto& impl = *self.unsafeGetTensorImpl();
    const auto bytes =
        static_cast<std::size_t>(c10::multiply_integers(sizes)) * self.element_size();
    if (bytes > self.storage().nbytes()) {
        impl.set_storage_keep_dtype(storage_on(self.device(), bytes));
    }
    impl.set_sizes_contiguous(sizes);
    return self;
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
    const auto handle = reinterpret_cast<Handle>(stream.id());
    use_on(self.storage().data_ptr(), handle_of(stream.device_index(), handle));
}

}  // namespace oracle
