#pragma once
    const int across = i / height;  // phases of the same rows of B side by side
    col0 = across / P * BN | across % P << 20 | P << 24;
