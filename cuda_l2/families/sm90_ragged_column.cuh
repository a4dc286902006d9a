#pragma once
    col0 = i / height * BN;
