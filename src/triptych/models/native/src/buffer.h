// Memory of the kernels' own.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace triptych {

template <class T>
struct Buffer {  // grows, never shrinks; aligned to a cache line, zero when new
  T* get(size_t count) {
    if (count > capacity_) {
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)));
      if (!data_) throw std::bad_alloc();
      std::memset((void*)data_.get(), 0, count * sizeof(T));
      capacity_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t capacity_ = 0;
};

}  // namespace triptych
