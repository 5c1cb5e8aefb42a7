"""Pure, over Arrow: order, sums, fingerprints and merging of sorted runs."""
