// Mutates trace files and reads them: trace_fuzz MUTATIONS FILE... Meant for the sanitizer builds (sanitize.sh).
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

#include "trace_json.hpp"

using namespace mappnb::trace;

namespace {

std::vector<Field> fields() {
  std::vector<Field> out = {{"ph", Kind::letter, false},     {"ts", Kind::time, false},
                            {"dur", Kind::time, false},      {"pid", Kind::key, false},
                            {"tid", Kind::key, false},       {"name", Kind::text, false},
                            {"cat", Kind::text, false},      {"id", Kind::key, false},
                            {"bp", Kind::letter, false},     {"args", Kind::args, false},
                            {"stream", Kind::integer, true}, {"correlation", Kind::integer, true},
                            {"grid", Kind::text, true},      {"blocks per SM", Kind::real, true},
                            {"name", Kind::text, true},      {"counter", Kind::counter, false}};
  return out;
}

const char* const kSplice[] = {"\"", "\\",  "{",     "}",     "[",    "]",   ",",    ":",
                               "\n", "NaN", "1e999", "\\u12", "\xff", "\"}", "},{\""};

std::string mutated(std::string text, std::mt19937_64& rng) {
  auto at = [&](size_t n) { return n ? size_t(rng() % n) : 0; };
  for (uint64_t i = 0, n = 1 + rng() % 4; i < n && !text.empty(); i++) {
    const size_t a = at(text.size()), length = at(std::min<size_t>(text.size() - a, 400));
    switch (rng() % 6) {
      case 0:
        text[a] = char(rng());
        break;
      case 1:
        text[a] = char(text[a] ^ (1 << rng() % 8));
        break;
      case 2:
        text.erase(a, length);
        break;
      case 3:
        text.insert(at(text.size()), text.substr(a, length));
        break;
      case 4:
        text.insert(a, kSplice[rng() % std::size(kSplice)]);
        break;
      default:
        text.resize(a);
    }
  }
  return text;
}

int64_t read(const std::string& text, std::mt19937_64& rng, size_t most) {
  Reader reader(fields(), 3, rng() % 16 == 0);
  int64_t rows = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t n = std::min<size_t>(text.size() - at, 1 + rng() % most);
    reader.feed(std::string(text, at, n).data(), n);
    at += n;
    rows += int64_t(reader.take()[0].letters.size());
  }
  reader.finish();
  rows += int64_t(reader.take()[0].letters.size());
  int64_t mended = 0;
  for (const int64_t n : reader.repairs()) mended += n;
  if (rows == 0 && mended == 0 && reader.metadata().empty() && reader.bytes() > 2) {
    std::fprintf(stderr, "a silent empty result\n");
    std::abort();
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  const long mutations = argc > 1 ? std::atol(argv[1]) : 0;
  std::vector<std::string> texts = {
      "{\"schemaVersion\": 1, \"traceEvents\": [\n{\"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"a \\\"b\\\" "
      "\\u00e9\", \"pid\": 0, "
      "\"tid\": \"x\", \"ts\": 1712195495519689.123, \"dur\": 1.5, \"args\": {\"stream\": 7, \"grid\": [1, 2, 3], "
      "\"n\": {\"a\": [{}]}}},\n"
      "{\"ph\": \"C\", \"name\": \"mem\", \"pid\": 1, \"ts\": 5, \"args\": {\"used\": 1.5e9, \"free\": 3}},\n"
      "{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": 1, \"args\": {\"name\": \"C:\\dir\"}}],\n\"traceName\": "
      "\"x\"}"};
  for (int i = 2; i < argc; i++) {
    std::ifstream file(argv[i], std::ios::binary);
    texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::mt19937_64 rng(20261201);
  for (const std::string& text : texts) {
    const auto begin = std::chrono::steady_clock::now();
    int64_t rows = 0;
    double longest = 0;
    for (long i = 0; i < mutations; i++) {
      const auto one = std::chrono::steady_clock::now();
      rows += read(mutated(text, rng), rng, i % 3 ? 4096 : 17);
      longest = std::max(longest, std::chrono::duration<double>(std::chrono::steady_clock::now() - one).count());
    }
    const double all = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%zu bytes: %ld mutations, %lld rows, %.1f s, the longest %.3f s\n", text.size(), mutations,
                static_cast<long long>(rows), all, longest);
    if (longest > 20) return 1;
  }
  return 0;
}
