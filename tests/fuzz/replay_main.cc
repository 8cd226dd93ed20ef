// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0

// Stands in for libFuzzer where the compiler has none: feeds each file given, or each file in each folder given, to the
// target that it is linked with. Link with one *_fuzz.cc. A crash is the failure; an unreadable file is exit status 2.

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

bool Replay(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file.good() && !file.eof()) {
    std::fprintf(stderr, "replay: cannot read %s\n", path.c_str());
    return false;
  }
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  size_t n = 0;
  for (int i = 1; i < argc; ++i) {
    std::vector<std::filesystem::path> paths{argv[i]};
    std::error_code error;
    if (std::filesystem::is_directory(argv[i], error)) {
      paths.clear();
      for (const auto& entry : std::filesystem::directory_iterator(argv[i], error)) {
        if (entry.is_regular_file(error)) paths.push_back(entry.path());
      }
    }
    for (const auto& path : paths) {
      if (!Replay(path)) return 2;
      ++n;
    }
  }
  std::printf("replayed %zu inputs\n", n);
  return 0;
}
