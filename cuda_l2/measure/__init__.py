"""Times a correct candidate against baselines, interleaved in one run, outputs checked as it goes."""
