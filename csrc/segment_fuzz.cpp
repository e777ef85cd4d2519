// Mutates closed segments and decodes them: segment_fuzz MUTATIONS FILE... Meant for the sanitizer builds
// (sanitize.sh).
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "segment_columns.hpp"

using namespace mappnb;

namespace {

std::string bytes_of(const char* path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// All columns and row groups of a file that is whole, then of what became of it.
void decode(const std::string& path, const SegmentFooter& whole) {
  std::vector<int64_t> groups;
  size_t rows = 0;
  for (size_t g = 0; g < whole.groups.size(); g++) {
    groups.push_back(int64_t(g));
    rows += size_t(whole.groups[g].rows);
  }
  for (const auto& leaf : whole.leaves) {
    const size_t width = leaf.type == 2 ? 8 : 4;
    std::vector<uint8_t> out(rows * width);
    SegmentColumns().read(path, groups, {{leaf.name, out.data(), rows, width}});
  }
}

// Blocks of noise: lengths and distances of all kinds.
void unpack(std::mt19937_64& rng) {
  const size_t packed = rng() % 200, size = rng() % 600;
  std::vector<uint8_t> in(packed + kSlack), out(size + kSlack);
  for (size_t i = 0; i < packed; i++) in[i] = uint8_t(rng() % 8 ? rng() % 32 : rng());
  unpack_lz4(in.data(), packed, out.data(), size);
}

}  // namespace

int main(int argc, char** argv) {
  const long mutations = argc > 1 ? std::atol(argv[1]) : 1000;
  std::mt19937_64 rng(7);
  for (long i = 0; i < 50 * mutations; i++) unpack(rng);
  long refused = 0;
  for (int f = 2; f < argc; f++) {
    const std::string text = bytes_of(argv[f]);
    const std::string place = (std::filesystem::temp_directory_path() / "mappnb-segment-fuzz").string();
    if (text.size() < 12) continue;
    const size_t length = uint8_t(text[text.size() - 8]) | uint8_t(text[text.size() - 7]) << 8;
    const SegmentFooter whole =
        SegmentFooter::parse(reinterpret_cast<const uint8_t*>(text.data()) + text.size() - 8 - length, length);
    decode(argv[f], whole);
    for (long i = 0; i < mutations; i++) {
      std::string changed = text;
      for (uint64_t k = 0, n = 1 + rng() % 4; k < n; k++) {
        const size_t from = rng() % 2 ? 0 : changed.size() - 8 - length;  // pages and footer alike
        changed[from + rng() % (changed.size() - from)] = char(rng());
      }
      std::ofstream(place, std::ios::binary) << changed;
      try {
        decode(place, whole);
      } catch (const Refused&) {
        refused++;
      }
    }
    std::remove(place.c_str());
  }
  std::printf("segments: %ld changed files refused\n", refused);
}
