// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/quality_gate.h"

namespace qkv {

// Written for this project: prose, a list, a dialogue, code, figures, and things said twice that can be looked up.
std::string_view QualityText() {
  return R"(The lighthouse at Cape Orrin was built in 1874, when the harbour behind it was still a row of fishing huts.
Its keeper, a widow named Maren Holt, wrote down the weather twice a day for thirty-one years. Her notebooks are kept
in the town library, and they are the longest record of wind on that coast. On most days she needed a single line:
"North-west, fresh, clear. Two ships." On the day of the great storm she needed four pages, and the last of them ends
in the middle of a sentence, because the window of the watch room had blown in.

What the notebooks show, once somebody has the patience to copy them into a table, is that the wind has turned. In the
first ten years it came from the north-west on six days out of ten. In the last ten it did so on four. Nobody noticed
at the time, since a change of that kind is too slow to be seen by one person, however careful. It was a schoolteacher
who found it, a century later, when she let her pupils count the entries as an exercise in fractions.

The harbour council meets on the first Monday of every month. These are the points of the last meeting:

1. The old crane is to be painted before winter. Cost: 2,450, of which the fishing company pays half.
2. The eastern pier needs eleven new beams. Two offers were read; the lower one is from the yard in Vessel Bay.
3. The schoolteacher, Ms. Anders, asks for a glass case in which the notebooks of Maren Holt can be shown.
4. The next meeting is on the fourth of May at half past seven, in the library and not in the town hall.

"A glass case is not expensive," said the chairman. "But who is going to turn the pages?"

"We could open another one every week," said Ms. Anders. "There are sixty-two notebooks. That is more than a year."

"And the storm?"

"The storm stays for the anniversary," she said, and everybody agreed that this was right.

A small program is enough to count the entries. It reads one line per day and adds up how often each direction occurs:

    def count_directions(lines):
        counts = {}
        for line in lines:
            direction, strength, sky = [part.strip() for part in line.split(",")][:3]
            counts[direction] = counts.get(direction, 0) + 1
        return counts

    with open("notebooks.csv") as file:
        counts = count_directions(file)
    for direction, n in sorted(counts.items(), key=lambda item: -item[1]):
        print(direction, n, f"{100 * n / sum(counts.values()):.1f} %")

Run over the first notebook, which covers the year 1874, it prints north-west 214, west 61, south-west 48, north 29,
south 8 and east 5. The sum is 365, as it should be. For the last notebook, the same program prints north-west 139,
west 98, south-west 83, north 31, south 9 and east 5. Again the sum is 365.

To a sailor these numbers say something else than to a builder. The sailor reads in them that the harbour mouth, which
opens to the south-west, is open to the wind on more days than it used to be, and that it would be wise to leave before
noon. The builder reads that the western wall of every house will need a second coat. The schoolteacher reads that her
pupils can do fractions. And the visitor, who stands in the library before the glass case, reads only one line, in a
clear and upright hand: "North-west, fresh, clear. Two ships."

Questions that visitors ask most often:

Who built the lighthouse? The province did, in 1874, when the harbour was still a row of fishing huts.
Who kept the notebooks? The keeper, a widow named Maren Holt, for thirty-one years.
How many notebooks are there? Sixty-two. One is shown at a time, and another one every week.
Who found that the wind had turned? A schoolteacher, Ms. Anders, when she let her pupils count the entries.
Where does the council meet? In the library, on the first Monday of every month, at half past seven.
What does the last page of the storm say? It ends in the middle of a sentence, because the window had blown in.
)";
}

}  // namespace qkv
