// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/base/kill_point.h"

#include <gtest/gtest.h>

#include <iterator>
#include <set>

namespace qkv {
namespace {

TEST(KillPoint, ASpecNamesAPointAndAPassage) {
  for (const char* good : {"segment.seal", "segment.seal:1", "store.part:12", "*:7", "*"}) {
    EXPECT_TRUE(IsKillSpec(good)) << good;
  }
  for (const char* bad : {"", ":1", "segment.seel", "segment.seal:", "segment.seal:0", "segment.seal:-1",
                          "segment.seal:1x", "*:99999999999999999999"}) {
    EXPECT_FALSE(IsKillSpec(bad)) << bad;
  }
}

TEST(KillPoint, EveryNameIsThereOnce) {
  const std::set<std::string_view> names(std::begin(kKillPoints), std::end(kKillPoints));
  EXPECT_EQ(names.size(), std::size(kKillPoints));
}

TEST(KillPoint, NothingHappensUnlessToldTo) {
  ASSERT_EQ(std::getenv("QKV_KILL_AT"), nullptr);
  for (const std::string_view name : kKillPoints) KillPoint(name);  // we are still here
}

}  // namespace
}  // namespace qkv
