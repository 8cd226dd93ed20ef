// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/layer_bits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "qkv/engine/preset.h"

namespace qkv {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

constexpr CodecId kOfBits[] = {CodecId::k3, CodecId::k4, CodecId::k5, CodecId::k6, CodecId::k7, CodecId::k8};

// A bit is worth a factor of four, as on paper; K is ten times as sensitive as V.
LayerSensitivity Sensitivity(std::vector<double> k, std::vector<double> v) {
  LayerSensitivity s;
  s.k.layer = std::move(k);
  s.v.layer = std::move(v);
  for (int i = 0; i < kLayerWidths; ++i) {
    s.k.widths[static_cast<size_t>(i)] = 1e-2 * std::pow(4, -i);
    s.v.widths[static_cast<size_t>(i)] = 1e-3 * std::pow(4, -i);
  }
  s.tokens = 1000;
  return s;
}

std::vector<CodecPair> Pairs(const LayerCodecs& table) {
  std::vector<CodecPair> pairs;
  for (int i = 0; i < table.geometry().n_layers; ++i) pairs.push_back(table.at(i).codecs);
  return pairs;
}

TEST(LayerBits, ATableOfOnePairHasWhatWasMeasuredForIt) {
  const LayerSensitivity s = Sensitivity({1, 2, 5}, {3, 3, 1});
  for (size_t k = 0; k < 6; ++k) {
    for (size_t v = 0; v < 6; ++v) {
      const std::vector<CodecPair> same(3, {kOfBits[k], kOfBits[v]});
      EXPECT_NEAR(PredictKl(s, same), s.k.widths[k] + s.v.widths[v], 1e-12);
    }
  }
  // A layer's share is of its own side.
  EXPECT_NEAR(PredictKl(s,
                        std::vector<CodecPair>{
                            {CodecId::k4, CodecId::k3}, {CodecId::k3, CodecId::k3}, {CodecId::k3, CodecId::k3}}),
              1.1e-2 - 1e-2 / 8 * 3 / 4, 1e-12);
}

TEST(LayerBits, BitsGoWhereTheyGainMost) {
  const Geometry geometry{2, 1, 64};
  // 3.25 bits of codes and scale each; one bit on one of the four sides is 0.25 per value.
  const LayerSensitivity s = Sensitivity({1, 100}, {1, 1});
  const auto at = [&](double bits) { return Pairs(**LayersWithinBits(s, geometry, bits)); };
  const auto pairs = [](std::initializer_list<CodecPair> list) { return std::vector<CodecPair>(list); };
  EXPECT_EQ(at(3.25), pairs({{CodecId::k3, CodecId::k3}, {CodecId::k3, CodecId::k3}}));
  EXPECT_EQ(at(3.49), at(3.25));
  // Gains in 1e-5: K of layer 1 by its next bits 743, 186, 46; V of either layer 37.5, 9; K of layer 0 7.4.
  EXPECT_EQ(at(3.5), pairs({{CodecId::k3, CodecId::k3}, {CodecId::k4, CodecId::k3}}));
  EXPECT_EQ(at(4.0), pairs({{CodecId::k3, CodecId::k3}, {CodecId::k6, CodecId::k3}}));
  EXPECT_EQ(at(4.25), pairs({{CodecId::k3, CodecId::k4}, {CodecId::k6, CodecId::k3}}));  // of equals the first
  EXPECT_EQ(at(4.5), pairs({{CodecId::k3, CodecId::k4}, {CodecId::k6, CodecId::k4}}));
  EXPECT_EQ(at(8.25), pairs({{CodecId::k8, CodecId::k8}, {CodecId::k8, CodecId::k8}}));
  EXPECT_EQ(at(16), at(8.25));
}

// Against all tables there are.
TEST(LayerBits, NoTableWithinTheLimitIsPredictedBetter) {
  const Geometry geometry{2, 1, 32};
  std::mt19937 random(7);
  std::lognormal_distribution<double> spread(0, 2);
  for (int round = 0; round < 40; ++round) {
    const LayerSensitivity s = Sensitivity({spread(random), spread(random)}, {spread(random), spread(random)});
    const double bits = 3.5 + (round % 20) * 0.25;
    const auto chosen = *LayersWithinBits(s, geometry, bits);
    EXPECT_LE(BitsPerValue(*chosen), bits);
    double best = std::numeric_limits<double>::infinity();
    for (int table = 0; table < 6 * 6 * 6 * 6; ++table) {
      const std::vector<CodecPair> all = {{kOfBits[table % 6], kOfBits[table / 6 % 6]},
                                          {kOfBits[table / 36 % 6], kOfBits[table / 216]}};
      if (BitsPerValue(**LayerCodecs::Create(geometry, all)) <= bits) best = std::min(best, PredictKl(s, all));
    }
    EXPECT_NEAR(PredictKl(s, Pairs(*chosen)), best, 1e-12);
  }
}

TEST(LayerBits, TheLimitHoldsInBytesToo) {
  const Geometry geometry{3, 2, 80};
  const LayerSensitivity s = Sensitivity({1, 5, 2}, {2, 1, 4});
  const size_t fewest = PageLayout(geometry, {CodecId::k3, CodecId::k3}).block_bytes;
  for (size_t more = 0; more < 9000; more += 401) {
    const auto table = LayersWithin(s, geometry, fewest + more);
    ASSERT_TRUE(table);
    EXPECT_LE((*table)->block_bytes(), fewest + more);
    EXPECT_GT((*table)->block_bytes() + 2 * 4 * 80, fewest + more);  // and is used: no further bit would fit
  }
  const auto none = LayersWithin(s, geometry, fewest - 1);
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().message, HasSubstr("3 bits in every layer"));
  EXPECT_THAT(LayersWithinBits(s, geometry, 3.1).error().message, HasSubstr("3.1 bits"));
  EXPECT_FALSE(LayersWithinBits(s, geometry, std::nan("")));
}

TEST(LayerBits, AFileIsReadAsItWasWritten) {
  const LayerSensitivity s = Sensitivity({1e-7, 0.25, 0}, {1, 1.0 / 3, 2});
  const auto read = ParseLayerSensitivity(ToJson(s, "ab"), "ab", 3, "f");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, s);
}

TEST(LayerBits, EveryFieldOfAFileIsChecked) {
  const Json good = Json::parse(ToJson(Sensitivity({1, 2}, {3, 4}), "ab"));
  const auto error = [&](const std::function<void(Json&)>& damage) {
    Json bad = good;
    damage(bad);
    const auto read = ParseLayerSensitivity(bad.dump(), "ab", 2, "the file");
    EXPECT_FALSE(read) << bad.dump();
    return read ? Error{} : read.error();
  };
  for (const char* field : {"qkvlayers", "probe_bits", "first_width"}) {
    EXPECT_EQ(error([&](Json& j) { j[field] = 99; }).code, Code::kIncompatible) << field;
    EXPECT_EQ(error([&](Json& j) { j[field] = "1"; }).code, Code::kIncompatible) << field;
  }
  const Error other = error([](Json& j) { j["weights_digest"] = "cd"; });
  EXPECT_EQ(other.code, Code::kIncompatible);
  EXPECT_THAT(other.message, HasSubstr("'the file' is of another model"));
  EXPECT_EQ(error([](Json& j) { j["weights_digest"] = 1; }).code, Code::kIncompatible);
  EXPECT_EQ(error([](Json& j) { j.erase("weights_digest"); }).code, Code::kIncompatible);
  for (const char* side : {"k", "v"}) {
    EXPECT_EQ(error([&](Json& j) { j.erase(side); }).code, Code::kCorrupt);
    EXPECT_EQ(error([&](Json& j) { j[side] = 1; }).code, Code::kCorrupt);
    for (const char* list : {"layers", "widths"}) {
      EXPECT_EQ(error([&](Json& j) { j[side].erase(list); }).code, Code::kCorrupt);
      EXPECT_EQ(error([&](Json& j) { j[side][list].push_back(1); }).code, Code::kCorrupt);
      EXPECT_EQ(error([&](Json& j) { j[side][list][1] = -1; }).code, Code::kCorrupt);
      EXPECT_EQ(error([&](Json& j) { j[side][list][1] = nullptr; }).code, Code::kCorrupt);  // as NaN is written
      EXPECT_EQ(error([&](Json& j) { j[side][list][0] = j[side][list][1] = 1.7e308; }).code, Code::kCorrupt);
      EXPECT_EQ(error([&](Json& j) {
                  for (Json& number : j[side][list]) number = 0;
                }).code,
                Code::kCorrupt);
    }
  }
  EXPECT_EQ(error([](Json& j) { j["tokens"] = -1; }).code, Code::kCorrupt);
  EXPECT_EQ(error([](Json& j) { j = Json::array(); }).code, Code::kCorrupt);
  for (const char* text : {"", "{", "null", "[1]", "{\"qkvlayers\":"}) {
    EXPECT_EQ(ParseLayerSensitivity(text, "ab", 2, "f").error().code, Code::kCorrupt) << text;
  }
}

}  // namespace
}  // namespace qkv
