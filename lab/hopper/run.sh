#!/bin/bash
# run.sh SETS SHAPES PREFIX SECONDS [cap]: build the driver and a set of variants, time them on the shapes.
cd "$(dirname "$0")"; W=/tmp/lab_${3}; mkdir -p $W; SITE=$(python3 -c 'import nvidia,os;print(list(nvidia.__path__)[0])' 2>/dev/null)
INC=$(dirname "$(find /usr/local/cuda*/ $SITE -name cublasLt.h 2>/dev/null | head -1)")
LIB=$(dirname "$(find $SITE /usr/local/cuda*/ -name 'libcublasLt.so.13*' 2>/dev/null | head -1)"); export LD_LIBRARY_PATH=$LIB:$LD_LIBRARY_PATH
(cd kernels && python3 gen_wgmma.py); t0=$(date +%s); python3 gen.py $W $1
if [ ! -x /tmp/bench ] || [ bench.cu -nt /tmp/bench ]; then nvcc -O2 -std=c++17 -I$INC -gencode=arch=compute_90a,code=sm_90a bench.cu -o /tmp/bench -lcuda -ldl 2>&1 | grep -i error; fi
[ -f cubins_$3.tgz ] && tar xzf cubins_$3.tgz -C /  # cubins of an earlier call with the same prefix and leading sets
paste -d'|' <(cut -d' ' -f1 $W/manifest.txt) $W/build.txt | while IFS='|' read -r f cmd; do [ -f $f ] || printf '%s\0' "$cmd"; done > $W/todo; xargs -0 -P 20 -I{} bash -c '{}' < $W/todo
echo "built in $(( $(date +%s) - t0 )) s; serialised: $(grep -l C7510 $W/*.log | wc -l); spills: $(grep -L ' 0 bytes spill stores' $W/*.log | wc -l)"
t1=$(date +%s)
for try in 1 2 3 4 5 6 7 8; do
  left=$(( $4 - ($(date +%s) - t1) )); [ $left -lt 3 ] && break
  timeout $((left + 30)) /tmp/bench $W/manifest.txt $2 $OUT/$3 $left $5 && break
  echo "restart after: $(tail -1 $OUT/$3_skip.txt)"
done 2>&1 | grep -v "^local memory"
rm -f $OUT/$3_done.txt
