// Columns of integers of closed segments, decoded into the caller's memory: the subset of Parquet that
// mappnb/segment_writer.py writes (flat, whole numbers, no value missing, plain or split bytes, LZ4 or nothing).
// Whatever else a file holds is refused with Refused, never guessed: pyarrow reads all of Parquet, slower.
// Source: the Parquet format's specification (apache/parquet-format: README, Encodings.md, parquet.thrift) and the
// LZ4 block format (lz4_Block_format.md). Knows nothing of Python (see segment_columns_py.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace mappnb {

// A file, or a part of one, that this reader does not know: corrupt, or another kind of Parquet.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes of Thrift's compact protocol, read in order; what goes past the end is refused.
class Thrift {
 public:
  enum Type : uint8_t { kStop, kTrue, kFalse, kByte, kI16, kI32, kI64, kDouble, kBinary, kList, kSet, kMap, kStruct };
  struct List {
    uint8_t type;
    size_t size;
  };
  Thrift(const uint8_t* begin, const uint8_t* end) : at(begin), end_(end) {}
  // Return the next field of a struct, 0 for no more.
  int16_t field(uint8_t& type);
  // Read a struct: `take(id, type)` reads the value of each field. Those of a struct within it are numbered anew.
  template <class F>
  void each(F take) {
    const int16_t reached = last_;
    last_ = 0;
    uint8_t type;
    while (const int16_t id = field(type)) take(id, type);
    last_ = reached;
  }
  int64_t number(uint8_t type);
  List list();
  std::string text();
  void skip(uint8_t type, int depth = 0);
  const uint8_t* at;

 private:
  uint8_t byte();
  uint64_t varint();
  void need(size_t bytes) const;
  const uint8_t* end_;
  int16_t last_ = 0;
};

struct ColumnChunk {
  int64_t codec = -1, values = 0, size = 0, page = -1, dictionary = -1;
};

struct SegmentFooter {
  struct Leaf {
    std::string name;
    int32_t type = -1;  // 1: INT32, 2: INT64
    bool optional = false;
  };
  struct Group {
    int64_t rows = 0;
    std::vector<ColumnChunk> chunks;
  };
  std::vector<Leaf> leaves;
  std::vector<Group> groups;
  static SegmentFooter parse(const uint8_t* data, size_t size);
};

// Where a column goes: an array of rows of 2, 4 or 8 bytes each.
struct Target {
  std::string name;
  uint8_t* data;
  size_t rows, width;
};

class SegmentColumns {
 public:
  // Decode row groups of the file, one after the other; every target gets all their rows.
  void read(const std::string& path, const std::vector<int64_t>& groups, const std::vector<Target>& targets);

 private:
  void load(int file, int64_t begin, int64_t end);
  void chunk(const SegmentFooter::Leaf& leaf, const ColumnChunk& chunk, const Target& target, size_t row, size_t rows);
  std::vector<uint8_t> footer_, bytes_, page_;
  int64_t begin_ = 0, end_ = 0;  // of the file, held in bytes_
};

// Unpack one LZ4 block; true where it makes exactly `size` bytes. Both arrays have kSlack bytes more than is theirs.
constexpr size_t kSlack = 32;
bool unpack_lz4(const uint8_t* in, size_t packed, uint8_t* out, size_t size);

}  // namespace mappnb
