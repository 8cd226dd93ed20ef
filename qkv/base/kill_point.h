// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Named places at which a process can be told to die, as kill -9 would have it, so that tests can prove what is left
// behind (tests/kill_test.cc). QKV_KILL_AT=NAME[:N] dies when the N-th passage (default: the first) of point NAME is
// reached; QKV_KILL_AT=*:N when the N-th passage of any point is. Any thread.
//
// They are in every build: what is tested is what is shipped. A point costs one branch on a constant set at the start,
// and none is inside a loop over tokens. Whoever may set our environment may kill us anyway.

#include <string_view>

namespace qkv {

// The points, in the order in which a context meets them. tests/kill_test.cc goes through this list.
inline constexpr std::string_view kKillPoints[] = {
    // producer
    "segment.append",  // a page has its memory, and is not written
    "segment.seal",    // header and table are written, the seals are not set
    "segment.sealed",
    "publish.card",  // the card is sealed, nothing is sent
    "client.send",   // before every request
    "client.sent",   // the request is on its way, the reply not read
    "publish.done",
    // broker
    "broker.received",  // a request, before anything came of it
    "broker.admitted",  // a published context is checked, and not known yet
    "broker.published",
    "broker.granted",  // a lease is made, descriptors are not sent
    "broker.replied",
    "broker.released",
    "broker.removed",
    // broker, disk tier
    "store.part",             // a temporary file is there, empty
    "store.written",          // it is written, perhaps not on the disk
    "store.synced",           // it is on the disk under its temporary name
    "store.renamed",          // a segment has its name
    "store.segments_synced",  // all have, and the directory is on the disk
    "store.committed",        // the context's file has its name
    "store.directory_synced",
    "store.unlinked",  // the context's file is gone, its segments are not
    // consumer
    "attach.received",  // descriptors are here
    "attach.opened",    // segments are mapped
    "segment.verified",
    "client.release",
};

namespace internal {
extern const bool kill_point_armed;
void PassKillPoint(std::string_view name);
}  // namespace internal

inline void KillPoint(std::string_view name) {
  if (internal::kill_point_armed) [[unlikely]]
    internal::PassKillPoint(name);
}

// Whether `spec` is NAME[:N] with a name of the list, or *:N.
bool IsKillSpec(std::string_view spec);

}  // namespace qkv
