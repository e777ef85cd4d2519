#include "selftime_store.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace mappnb {

namespace {

constexpr size_t kPiece = size_t(8) << 20, kAlign = 64;

}  // namespace

Pages::~Pages() {
  for (const Piece& p : pieces_) munmap(p.data, p.size);
}

void* Pages::take(size_t bytes) {
  bytes = (bytes + kAlign - 1) / kAlign * kAlign;
  for (; piece_ < pieces_.size(); piece_++, used_ = 0) {
    if (pieces_[piece_].size - used_ < bytes) continue;
    used_ += bytes;
    return pieces_[piece_].data + (used_ - bytes);
  }
  const size_t size = std::max(kPiece, bytes);
  pieces_.reserve(pieces_.size() + 1);
  void* const found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(found, size, MADV_HUGEPAGE);  // a wish: fewer page faults
#endif
  pieces_.push_back({static_cast<char*>(found), size});
  piece_ = pieces_.size() - 1;
  used_ = bytes;
  return found;
}

}  // namespace mappnb
