// Objects whose addresses others may still hold after they were given back.

#pragma once

#include <cstddef>
#include <deque>

namespace keepstep {

// Hands out objects that are never freed, and reuses them late, in the order in which they were
// given back: a stale address then points to an object that is free, and not to another one's.
// After a while it allocates nothing. Not thread-safe. T has a member `T* next`.
template <typename T, size_t KEPT>
class Slab {
 public:
  T& take() {
    if (free_ <= KEPT) return objects_.emplace_back();
    T& taken = *oldest_;
    oldest_ = taken.next;
    --free_;
    taken.next = nullptr;
    return taken;
  }

  void give_back(T& object) {
    object.next = nullptr;
    (free_ == 0 ? oldest_ : newest_->next) = &object;
    newest_ = &object;
    ++free_;
  }

 private:
  std::deque<T> objects_;
  T* oldest_ = nullptr;
  T* newest_ = nullptr;
  size_t free_ = 0;
};

}  // namespace keepstep
