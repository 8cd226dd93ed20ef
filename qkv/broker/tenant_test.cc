// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/broker/tenant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "qkv/broker/test_support.h"

namespace qkv {
namespace {

using test::Outcome;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kText[] =
    "# tenants\n"
    "\n"
    "ann  ann-ann-ann-ann-1\n"
    "bob\tbob-bob-bob-bob-2\r\n";

TEST(TenantList, FindsTheTenantOfAToken) {
  const TenantList list = test::Take(TenantList::Parse(kText));
  EXPECT_THAT(list.names(), ElementsAre("ann", "bob"));
  EXPECT_EQ(list.Find("ann-ann-ann-ann-1"), 0u);
  EXPECT_EQ(list.Find("bob-bob-bob-bob-2"), 1u);
  for (const char* no : {"", "ann", "ann-ann-ann-ann-2", "ann-ann-ann-ann-", "ann-ann-ann-ann-11"}) {
    EXPECT_EQ(list.Find(no), std::nullopt) << no;
  }
}

TEST(TenantList, RefusesWhatItCannotMean) {
  const char* bad[] = {
      "",
      "# nobody\n",
      "ann\n",
      "ann short\n",
      "ann 0123456789abcdef more\n",
      "../ann 0123456789abcdef\n",
      "ann 0123456789abcdef\nann 0123456789abcdeg\n",
      "ann 0123456789abcdef\nbob 0123456789abcdef\n",
      "ann 0123456789abcd\x01"
      "ef\n",
  };
  for (const char* text : bad) EXPECT_EQ(Outcome(TenantList::Parse(text)), "invalid_argument") << text;
  EXPECT_EQ(Outcome(TenantList::Parse("ann " + std::string(257, 'x'))), "invalid_argument");
  const auto second = TenantList::Parse("ann 0123456789abcdef\nbob secret-secret\n");
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message, HasSubstr("line 2"));
  EXPECT_THAT(second.error().message, Not(HasSubstr("secret-secret")));
}

TEST(TenantList, ReadsOnlyAFileThatOthersCannotRead) {
  const test::TemporaryFolder folder;
  const std::string path = folder / "tenants";
  std::ofstream(path) << kText;
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  EXPECT_EQ(Outcome(TenantList::Read(path)), "denied/denied");
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(Outcome(TenantList::Read(path)), "ok");
  EXPECT_EQ(Outcome(TenantList::Read(folder / "none")), "not_found");
  EXPECT_EQ(Outcome(TenantList::Read(folder.path())), "denied/denied");
}

}  // namespace
}  // namespace qkv
