#include "segment_columns.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace mappnb {

namespace {

constexpr int64_t kPlain = 0, kSplit = 9;          // parquet.thrift: Encoding
constexpr int64_t kUncompressed = 0, kLz4Raw = 7;  // CompressionCodec
constexpr int32_t kInt32 = 1, kInt64 = 2;          // Type
constexpr size_t kTail = 8;                        // length of the footer, and the letters PAR1

class File {
 public:
  explicit File(const std::string& path) : number(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (number < 0) throw Refused("cannot be opened");
  }
  ~File() { close(number); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const int number;
};

void read_at(int file, int64_t offset, uint8_t* out, size_t size) {
  while (size) {
    const ssize_t got = pread(file, out, size, offset);
    if (got <= 0) throw Refused("ends early");
    out += got;
    offset += got;
    size -= size_t(got);
  }
}

uint32_t word(const uint8_t* at) {
  return uint32_t(at[0]) | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16 | uint32_t(at[3]) << 24;
}

struct Page {
  int64_t type = -1, unpacked = -1, packed = -1, values = -1, encoding = -1, levels = -1;
  const uint8_t* data = nullptr;
};

Page page_header(const uint8_t* at, const uint8_t* end) {
  Page page;
  Thrift in(at, end);
  const auto data_page = [&](int16_t id, uint8_t type) {
    if (id == 1)
      page.values = in.number(type);
    else if (id == 2)
      page.encoding = in.number(type);
    else if (id == 3)
      page.levels = in.number(type);
    else
      in.skip(type);
  };
  in.each([&](int16_t id, uint8_t type) {
    if (id == 1)
      page.type = in.number(type);
    else if (id == 2)
      page.unpacked = in.number(type);
    else if (id == 3)
      page.packed = in.number(type);
    else if (id == 5 && type == Thrift::kStruct)
      in.each(data_page);
    else
      in.skip(type);
  });
  page.data = in.at;
  return page;
}

// The definition levels of a page all say that the value is there: returns where the values begin.
const uint8_t* past_levels(const uint8_t* at, const uint8_t* end, size_t values) {
  if (end - at < 4) throw Refused("levels end early");
  const size_t size = word(at);
  at += 4;
  if (size > size_t(end - at)) throw Refused("levels end early");
  const uint8_t *stop = at + size, *values_at = stop;
  size_t seen = 0;
  while (seen < values) {
    uint64_t header = 0;
    for (int shift = 0;; shift += 7) {
      if (at == stop || shift > 35) throw Refused("levels end early");
      header |= uint64_t(*at & 127) << shift;
      if (!(*at++ & 128)) break;
    }
    const uint64_t count = header >> 1;
    const size_t bytes = header & 1 ? size_t(count) : 1;
    if (!count || bytes > size_t(stop - at)) throw Refused("levels end early");
    for (size_t i = 0; i < bytes; i++) {  // a run of one value, or eight of them a byte
      const size_t left = values - std::min(values, seen + 8 * i);
      const uint8_t all = header & 1 ? uint8_t(left < 8 ? (1 << left) - 1 : 255) : 1;
      if ((at[i] & all) != all) throw Refused("has missing values");
    }
    at += bytes;
    seen += header & 1 ? size_t(count) * 8 : size_t(count);
  }
  return values_at;
}

// Eight words of eight bytes: byte k of word i goes to byte i of word k.
inline void turn(uint64_t (&w)[8]) {
  constexpr uint64_t kOne = 0x00ff00ff00ff00ffu, kTwo = 0x0000ffff0000ffffu, kFour = 0x00000000ffffffffu;
  const auto swap = [&w](int a, int b, uint64_t mask, int shift) {
    const uint64_t t = ((w[a] >> shift) ^ w[b]) & mask;
    w[a] ^= t << shift;
    w[b] ^= t;
  };
  for (const int i : {0, 2, 4, 6}) swap(i, i + 1, kOne, 8);
  for (const int i : {0, 1, 4, 5}) swap(i, i + 2, kTwo, 16);
  for (const int i : {0, 1, 2, 3}) swap(i, i + 4, kFour, 32);
}

void join_split8(const uint8_t* in, size_t n, uint8_t* out) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t w[8];
    for (size_t k = 0; k < 8; k++) std::memcpy(&w[k], in + k * n + i, 8);
    turn(w);
    for (size_t k = 0; k < 8; k++) std::memcpy(out + 8 * (i + k), &w[k], 8);
  }
  for (; i < n; i++)
    for (size_t k = 0; k < 8; k++) out[8 * i + k] = in[k * n + i];
}

void join_split4(const uint8_t* in, size_t n, uint8_t* out) {
  const uint8_t *a = in, *b = in + n, *c = in + 2 * n, *d = in + 3 * n;
  for (size_t i = 0; i < n; i++) {
    const uint32_t value = uint32_t(a[i]) | uint32_t(b[i]) << 8 | uint32_t(c[i]) << 16 | uint32_t(d[i]) << 24;
    std::memcpy(out + 4 * i, &value, 4);
  }
}

void put(const uint8_t* in, size_t n, int64_t encoding, size_t width, const Target& target, size_t row) {
  uint8_t* out = target.data + row * target.width;
  if (encoding == kSplit) {
    if (target.width != width) throw Refused("split bytes of another width");
    width == 8 ? join_split8(in, n, out) : join_split4(in, n, out);
  } else if (target.width == width) {
    std::memcpy(out, in, n * width);
  } else {  // 16 bits are stored as 32
    for (size_t i = 0; i < n; i++) std::memcpy(out + 2 * i, in + 4 * i, 2);
  }
}

}  // namespace

void SegmentColumns::chunk(const SegmentFooter::Leaf& leaf, const ColumnChunk& chunk, const Target& target, size_t row,
                           size_t rows) {
  const size_t width = leaf.type == kInt64 ? 8 : 4;
  if (leaf.type != kInt32 && leaf.type != kInt64) throw Refused("column " + leaf.name + ": no whole numbers");
  if (target.width != width && !(target.width == 2 && width == 4)) throw Refused(leaf.name + ": another width");
  if (chunk.dictionary >= 0 || (chunk.codec != kUncompressed && chunk.codec != kLz4Raw) ||
      chunk.values != int64_t(rows) || chunk.page < begin_ || chunk.size < 0 || chunk.size > end_ - chunk.page)
    throw Refused("column " + leaf.name + ": stored in another way");
  const uint8_t *at = bytes_.data() + (chunk.page - begin_), *end = at + chunk.size;
  for (size_t done = 0; done < rows;) {
    const Page page = page_header(at, end);
    const size_t most = (rows - done) * (width + 1) + 64;  // levels take little
    if (page.type != 0 || (page.encoding != kPlain && page.encoding != kSplit) || page.levels != 3 ||
        page.values <= 0 || page.values > int64_t(rows - done) || page.packed < 0 || page.packed > end - page.data ||
        page.unpacked < 0 || page.unpacked > int64_t(most))
      throw Refused("column " + leaf.name + ": a page of another kind");
    const uint8_t* values = page.data;
    size_t size = size_t(page.packed);
    if (chunk.codec == kLz4Raw) {
      size = size_t(page.unpacked);
      if (page_.size() < size + kSlack) page_.resize(size + kSlack);
      if (!unpack_lz4(values, size_t(page.packed), page_.data(), size)) throw Refused(leaf.name + ": a corrupt page");
      values = page_.data();
    }
    const uint8_t* stop = values + size;
    if (leaf.optional) values = past_levels(values, stop, size_t(page.values));
    if (size_t(stop - values) != size_t(page.values) * width) throw Refused(leaf.name + ": a page of another length");
    put(values, size_t(page.values), page.encoding, width, target, row + done);
    done += size_t(page.values);
    at = page.data + page.packed;
  }
}

void SegmentColumns::load(int file, int64_t begin, int64_t end) {
  begin_ = begin;
  end_ = end;
  if (bytes_.size() < size_t(end - begin) + kSlack) bytes_.resize(size_t(end - begin) + kSlack);
  read_at(file, begin, bytes_.data(), size_t(end - begin));
}

void SegmentColumns::read(const std::string& path, const std::vector<int64_t>& groups,
                          const std::vector<Target>& targets) {
  const File file(path);
  const int64_t size = lseek(file.number, 0, SEEK_END);
  uint8_t tail[kTail];
  if (size < int64_t(kTail)) throw Refused("ends early");
  read_at(file.number, size - int64_t(kTail), tail, kTail);
  const int64_t length = word(tail);
  if (std::memcmp(tail + 4, "PAR1", 4) || length > size - int64_t(kTail)) throw Refused("has no footer");
  footer_.resize(size_t(length));
  read_at(file.number, size - int64_t(kTail) - length, footer_.data(), size_t(length));
  const SegmentFooter footer = SegmentFooter::parse(footer_.data(), size_t(length));
  std::vector<size_t> leaf;
  for (const Target& t : targets) {
    const auto same = [&t](const SegmentFooter::Leaf& l) { return l.name == t.name; };
    const auto found = std::find_if(footer.leaves.begin(), footer.leaves.end(), same);
    if (found == footer.leaves.end()) throw Refused("no column " + t.name);
    leaf.push_back(size_t(found - footer.leaves.begin()));
  }
  int64_t begin = size, end = 0;
  size_t rows = 0;
  for (const int64_t g : groups) {
    if (g < 0 || g >= int64_t(footer.groups.size())) throw Refused("no such row group");
    for (const size_t l : leaf) {
      const ColumnChunk& c = footer.groups[size_t(g)].chunks[l];
      if (c.page < 0 || c.size < 0 || c.page > size || c.size > size - c.page) throw Refused("ends early");
      begin = std::min(begin, c.page);
      end = std::max(end, c.page + c.size);
    }
    rows += size_t(footer.groups[size_t(g)].rows);
  }
  for (const Target& t : targets)
    if (t.rows != rows) throw Refused(t.name + ": not as many rows as the row groups have");
  if (begin < end) load(file.number, begin, end);
  size_t row = 0;
  for (const int64_t g : groups) {
    const SegmentFooter::Group& group = footer.groups[size_t(g)];
    for (size_t i = 0; i < targets.size(); i++)
      chunk(footer.leaves[leaf[i]], group.chunks[leaf[i]], targets[i], row, size_t(group.rows));
    row += size_t(group.rows);
  }
}

}  // namespace mappnb
