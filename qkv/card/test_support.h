// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// For tests: a card with everything in it.

#include <string>

#include "qkv/card/card.h"
#include "qkv/segment/layout.h"

namespace qkv::test {

// Every field that a card carried when the golden file was made; 70 tokens in two segments.
inline CacheCard ExampleCard() {
  CacheCard card;
  card.set_id("000102030405060708090a0b0c0d0e0f");
  card.set_name("research.notes-1");
  card.set_tenant("team_a");
  card.add_parents("ffeeddccbbaa99887766554433221100");
  card.set_created_unix_ms(1700000000000);
  card.set_expires_unix_ms(1700000600000);
  card.mutable_producer()->set_pid(4242);
  card.mutable_producer()->set_program("qkvshare 0.1.0");
  card.mutable_producer()->set_agent("researcher");
  ModelIdentity& model = *card.mutable_model();
  model.set_architecture("llama");
  model.set_name("SmolLM2 135M");
  model.set_n_vocab(49152);
  model.set_n_embd(576);
  for (int i = 0; i < 2; ++i) {
    qkvshare::v1::LayerDims& layer = *model.add_layers();
    layer.set_n_heads(9);
    layer.set_n_kv_heads(3);
    layer.set_k_head_dim(64);
    layer.set_v_head_dim(64);
  }
  model.mutable_layers(1)->set_kind(qkvshare::v1::LayerDims::SLIDING);
  model.mutable_layers(1)->set_window(1024);
  qkvshare::v1::Rope& rope = *model.mutable_rope();
  rope.set_base(10000);
  rope.set_scaling("yarn");
  rope.set_scaling_factor(4);
  rope.set_layout(qkvshare::v1::Rope::INTERLEAVED);
  rope.set_rotary_dims(64);
  rope.set_factors_digest("0123456789abcdef0123456789abcdef");
  rope.set_original_context(8192);
  model.set_weights_digest("00112233445566778899aabbccddeeff");
  model.set_tokenizer_digest("11111111111111111111111111111111");
  model.set_chat_template_digest("22222222222222222222222222222222");
  auto& adapter = *model.add_adapters();
  adapter.set_digest("33333333333333333333333333333333");
  adapter.set_scale(0.5f);
  auto& format = *card.mutable_format();
  format.set_segment_version(kSegmentVersion);
  format.set_page_tokens(32);
  format.set_rotation("none");
  format.set_byte_order("little");
  format.set_cpu_features("avx2 f16c");
  format.set_kv("i8");
  for (const char* digest : {"44444444444444444444444444444444", "55555555555555555555555555555555"}) {
    auto& segment = *card.add_segments();
    segment.set_digest(digest);
    segment.set_bytes(1 << 20);
    segment.set_n_pages(3);
  }
  auto& first = *card.add_spans();
  first.set_n_pages(2);
  first.set_n_tokens(60);
  auto& second = *card.add_spans();
  second.set_segment(1);
  second.set_first_page(2);
  second.set_n_pages(1);
  second.set_n_tokens(10);
  second.set_first_position(60);
  second.set_position_offset(-100);
  for (uint32_t i = 0; i < 70; ++i) card.add_token_ids(i * 700);
  card.mutable_importance()->add_top_tokens(69);
  card.mutable_turn()->set_open_turn(true);
  card.mutable_turn()->set_sampler("temp=0.8 top_k=40");
  card.mutable_turn()->set_seed(7);
  return card;
}

}  // namespace qkv::test
