// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/event_writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <optional>

#include "qkv/broker/test_support.h"

namespace qkv {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using test::Eventually;

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    read = Fd(ends[0]);
    write = Fd(ends[1]);
  }
  std::string ReadSome() const {
    char buffer[65536];
    const ssize_t n = ::read(read.get(), buffer, sizeof(buffer));
    return n > 0 ? std::string(buffer, static_cast<size_t>(n)) : "";
  }
  std::string ReadToEnd() const {
    std::string all;
    for (std::string some; !(some = ReadSome()).empty();) all += some;
    return all;
  }
  Fd read, write;
};

TEST(EventWriter, WritesEveryLineInOrder) {
  Pipe pipe;
  std::string expected;
  {
    EventWriter writer(pipe.write.get());
    for (int i = 0; i < 100; ++i) {
      writer.Write(fmt::format("line {}", i));
      expected += fmt::format("line {}\n", i);
    }
  }
  pipe.write.Reset();
  EXPECT_EQ(pipe.ReadToEnd(), expected);
}

TEST(EventWriter, NeverWaitsForAReaderAndSaysHowManyLinesItDropped) {
  Pipe pipe;
  constexpr int kLines = 3000;
  const std::string line(1000, 'x');  // 3 MB: far more than a pipe holds
  std::optional<EventWriter> writer(std::in_place, pipe.write.get(), 100);
  const auto start = steady_clock::now();
  for (int i = 0; i < kLines; ++i) writer->Write(line);
  EXPECT_LT(steady_clock::now() - start, milliseconds(1000));
  const uint64_t dropped = writer->n_dropped();
  EXPECT_GT(dropped, 2000u);

  std::string text;
  size_t n_lines = 0;
  const std::string said = fmt::format("\"event\":\"dropped\",\"lines\":{}}}\n", dropped);
  EXPECT_TRUE(Eventually([&] {
    text += pipe.ReadSome();
    return text.find(said) != std::string::npos;
  }));
  for (size_t at = 0; (at = text.find(line, at)) != std::string::npos; at += line.size()) ++n_lines;
  EXPECT_EQ(n_lines + dropped, size_t{kLines}) << "every line is written or counted";
}

TEST(EventWriter, EndsSoonWhenNobodyReads) {
  Pipe pipe;
  std::optional<EventWriter> writer(std::in_place, pipe.write.get());
  for (int i = 0; i < 1000; ++i) writer->Write(std::string(1000, 'x'));
  const auto start = steady_clock::now();
  writer.reset();
  EXPECT_LT(steady_clock::now() - start, milliseconds(3000));
}

TEST(EventWriter, AReaderThatIsGoneStopsNothing) {
  Pipe pipe;
  pipe.read.Reset();
  EventWriter writer(pipe.write.get());
  for (int i = 0; i < 100; ++i) writer.Write("line");  // no SIGPIPE, no endless loop
}

}  // namespace
}  // namespace qkv
