// Objects by handles that are never used twice, not even after a reset.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace pykern::fake {

// The address of a byte that nothing else has.
inline void* unused_address() {
    static std::mutex mutex;
    static std::deque<char> bytes;
    const std::scoped_lock lock(mutex);
    return &bytes.emplace_back();
}

template <class Handle, class Object>
class Handles {
   public:
    Handle add(std::shared_ptr<Object> object) {
        const auto handle = static_cast<Handle>(unused_address());
        objects_.emplace(handle, std::move(object));
        return handle;
    }

    // Null if the handle is unknown or was removed.
    std::shared_ptr<Object> find(Handle handle) const {
        const auto found = objects_.find(handle);
        return found == objects_.end() ? nullptr : found->second;
    }

    void remove(Handle handle) { objects_.erase(handle); }
    const std::unordered_map<Handle, std::shared_ptr<Object>>& all() const { return objects_; }

   private:
    std::unordered_map<Handle, std::shared_ptr<Object>> objects_;
};

}  // namespace pykern::fake
