// What segment_columns.hpp needs below Parquet's pages: Thrift's compact protocol, the footer, LZ4 blocks.
#include <algorithm>
#include <cstring>

#include "segment_columns.hpp"

namespace mappnb {

namespace {

constexpr size_t kMostLeaves = 1024, kMostGroups = 1 << 20;
constexpr int kDeepest = 16;
constexpr size_t kLong = 40;      // bytes of a match, from which it pays to copy by memcpy
constexpr int64_t kOptional = 1;  // parquet.thrift: FieldRepetitionType

size_t structs(Thrift& in, uint8_t type, size_t most) {
  if (type != Thrift::kList) throw Refused("a footer of another kind");
  const Thrift::List list = in.list();
  if (list.type != Thrift::kStruct || list.size > most) throw Refused("a footer of another kind");
  return list.size;
}

ColumnChunk chunk_of(Thrift& in) {
  ColumnChunk out;
  in.each([&](int16_t id, uint8_t type) {
    if (id != 3 || type != Thrift::kStruct) return in.skip(type);
    in.each([&](int16_t inner, uint8_t kind) {
      switch (inner) {
        case 4:
          out.codec = in.number(kind);
          break;
        case 5:
          out.values = in.number(kind);
          break;
        case 7:
          out.size = in.number(kind);
          break;
        case 9:
          out.page = in.number(kind);
          break;
        case 11:
          out.dictionary = in.number(kind);
          break;
        default:
          in.skip(kind);
      }
    });
  });
  return out;
}

SegmentFooter::Group group_of(Thrift& in, size_t leaves) {
  SegmentFooter::Group out;
  in.each([&](int16_t id, uint8_t type) {
    if (id == 1) {
      const size_t n = structs(in, type, leaves);
      for (size_t i = 0; i < n; i++) out.chunks.push_back(chunk_of(in));
    } else if (id == 3) {
      out.rows = in.number(type);
    } else {
      in.skip(type);
    }
  });
  if (out.chunks.size() != leaves || out.rows < 0 || out.rows > INT32_MAX) throw Refused("a row group of another kind");
  return out;
}

// The root first, which has all others as children; whatever is nested or repeated is refused.
std::vector<SegmentFooter::Leaf> leaves_of(Thrift& in, size_t n) {
  std::vector<SegmentFooter::Leaf> out;
  for (size_t i = 0; i < n; i++) {
    SegmentFooter::Leaf leaf;
    int64_t children = 0, repetition = 0;
    in.each([&](int16_t id, uint8_t type) {
      if (id == 1)
        leaf.type = int32_t(in.number(type));
      else if (id == 3)
        repetition = in.number(type);
      else if (id == 4 && type == Thrift::kBinary)
        leaf.name = in.text();
      else if (id == 5)
        children = in.number(type);
      else
        in.skip(type);
    });
    if (i == 0 ? children != int64_t(n) - 1 : children != 0 || repetition > kOptional)
      throw Refused("columns within columns");
    leaf.optional = repetition == kOptional;
    if (i) out.push_back(leaf);
  }
  return out;
}

}  // namespace

void Thrift::need(size_t bytes) const {
  if (bytes > size_t(end_ - at)) throw Refused("ends early");
}

uint8_t Thrift::byte() {
  need(1);
  return *at++;
}

uint64_t Thrift::varint() {
  uint64_t out = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const uint8_t b = byte();
    out |= uint64_t(b & 127) << shift;
    if (!(b & 128)) return out;
  }
  throw Refused("a number of too many bytes");
}

int16_t Thrift::field(uint8_t& type) {
  const uint8_t head = byte();
  type = head & 15;
  if (type == kStop) return 0;
  const int16_t id = int16_t(head >> 4 ? last_ + (head >> 4) : number(kI16));
  if (id <= 0) throw Refused("a field of another kind");
  return last_ = id;
}

int64_t Thrift::number(uint8_t type) {
  if (type != kI16 && type != kI32 && type != kI64) throw Refused("a field of another kind");
  const uint64_t raw = varint();
  return int64_t(raw >> 1) ^ -int64_t(raw & 1);
}

Thrift::List Thrift::list() {
  const uint8_t head = byte();
  const uint64_t size = head >> 4 == 15 ? varint() : head >> 4;
  need(size_t(size));  // each takes a byte at least
  return {uint8_t(head & 15), size_t(size)};
}

std::string Thrift::text() {
  const uint64_t size = varint();
  need(size_t(size));
  std::string out(reinterpret_cast<const char*>(at), size_t(size));
  at += size;
  return out;
}

void Thrift::skip(uint8_t type, int depth) {
  if (depth > kDeepest) throw Refused("too deep");
  if (type == kTrue || type == kFalse) return;
  if (type == kByte) {
    byte();
  } else if (type == kI16 || type == kI32 || type == kI64) {
    varint();
  } else if (type == kDouble) {
    need(8);
    at += 8;
  } else if (type == kBinary) {
    const uint64_t size = varint();
    need(size_t(size));
    at += size;
  } else if (type == kList || type == kSet) {
    const List of = list();
    const bool flags = of.type == kTrue || of.type == kFalse;
    for (size_t i = 0; i < of.size; i++) skip(flags ? uint8_t(kByte) : of.type, depth + 1);
  } else if (type == kStruct) {
    each([&](int16_t, uint8_t inner) { skip(inner, depth + 1); });
  } else {
    throw Refused("a field of another kind");
  }
}

SegmentFooter SegmentFooter::parse(const uint8_t* data, size_t size) {
  SegmentFooter out;
  Thrift in(data, data + size);
  uint8_t type;
  while (const int16_t id = in.field(type)) {
    if (id == 2) {
      out.leaves = leaves_of(in, structs(in, type, kMostLeaves));
    } else if (id == 4) {
      const size_t n = structs(in, type, kMostGroups);
      for (size_t i = 0; i < n; i++) out.groups.push_back(group_of(in, out.leaves.size()));
      return out;  // what follows is for others
    } else {
      in.skip(type);
    }
  }
  throw Refused("has no row groups");
}

bool unpack_lz4(const uint8_t* in, size_t packed, uint8_t* out, size_t size) {
  const uint8_t *const in_end = in + packed, *const begin = out, *const out_end = out + size;
  const auto longer = [&](size_t& length) {  // 15 and above go on in the following bytes
    uint8_t b = 255;
    while (b == 255) {
      if (in >= in_end) return false;
      length += b = *in++;
    }
    return true;
  };
  while (in < in_end) {
    const uint8_t token = *in++;
    size_t length = token >> 4;
    if (length == 15 && !longer(length)) return false;
    if (length > size_t(in_end - in) || length > size_t(out_end - out)) return false;
    if (length <= 16)
      std::memcpy(out, in, 16);  // both have room for it
    else
      std::memcpy(out, in, length);
    in += length;
    out += length;
    if (in == in_end) return out == out_end;
    if (in_end - in < 2) return false;
    const size_t back = size_t(in[0]) | size_t(in[1]) << 8;
    in += 2;
    length = (token & 15) + 4;
    if (length == 19 && !longer(length)) return false;
    if (!back || back > size_t(out - begin) || length > size_t(out_end - out)) return false;
    uint8_t* const stop = out + length;
    if (length > kLong) {  // twice as much of the pattern each time
      const uint8_t* const from = out - back;
      for (size_t have = back; out < stop; have *= 2) {
        const size_t n = std::min(have, size_t(stop - out));
        std::memcpy(out, from, n);
        out += n;
      }
    } else if (back >= 16) {
      for (uint8_t* to = out; to < stop; to += 16) std::memcpy(to, to - back, 16);
    } else {
      for (uint8_t* to = out; to < stop; to++) *to = *(to - back);
    }
    out = stop;
  }
  return false;
}

}  // namespace mappnb
