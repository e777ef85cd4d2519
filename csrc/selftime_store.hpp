// Memory for the transfers of many ranks: large pieces of the operating system's, where it can, in large pages. Written
// once, in order, read in order, forgotten at once, used again.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

namespace mappnb {

// A part of a store, as a container.
template <class T>
struct Span {
  T* data = nullptr;
  size_t count = 0;
  T* begin() const { return data; }
  T* end() const { return data + count; }
  size_t size() const { return count; }
  T& operator[](size_t i) const { return data[i]; }
};

class Pages {
 public:
  Pages() = default;
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  // Bytes side by side, aligned to 64, until the next clear().
  void* take(size_t bytes);
  void clear() { piece_ = used_ = 0; }

 private:
  struct Piece {
    char* data;
    size_t size;
  };
  std::vector<Piece> pieces_;
  size_t piece_ = 0, used_ = 0;  // the piece that is being filled, and how far
};

// What a vector holds, in a store.
template <class T>
Span<T> kept(Pages& pages, const std::vector<T>& values) {
  static_assert(std::is_trivially_copyable_v<T>);
  T* const to = static_cast<T*>(pages.take(values.size() * sizeof(T)));
  if (!values.empty()) std::memcpy(to, values.data(), values.size() * sizeof(T));
  return {to, values.size()};
}

}  // namespace mappnb
