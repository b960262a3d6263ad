// Objects by handles that are never used twice, not even after a reset, unless they are to be.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

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
        const bool again = reuses_ && !removed_.empty();
        const auto handle = again ? removed_.back() : static_cast<Handle>(unused_address());
        if (again) removed_.pop_back();
        objects_.emplace(handle, std::move(object));
        return handle;
    }

    // Null if the handle is unknown or was removed.
    std::shared_ptr<Object> find(Handle handle) const {
        const auto found = objects_.find(handle);
        return found == objects_.end() ? nullptr : found->second;
    }

    // New objects get the handles of removed ones, the last first, as from the driver.
    void reuse() { reuses_ = true; }

    void remove(Handle handle) {
        objects_.erase(handle);
        removed_.push_back(handle);
    }
    const std::unordered_map<Handle, std::shared_ptr<Object>>& all() const { return objects_; }

   private:
    std::unordered_map<Handle, std::shared_ptr<Object>> objects_;
    std::vector<Handle> removed_;
    bool reuses_ = false;
};

}  // namespace pykern::fake
