"""Write the build list (one nvcc call a line) and the manifest of a named set of kernel variants."""
import itertools, sys
out = []
def add(src, kind, **kw): out.append((src, kind, kw))
def stages(bm, bn, kb, ck=1, minb=1, outb=0, cap=12):
    stage = kb * (bm + bn) * 128
    inbox = bm * bn * 4 * (ck - 1) // ck if ck > 1 else 0
    room = (232448 if minb == 1 else 115 * 1024) - 1536 - 512 - inbox - outb
    return max(0, min(cap // kb if kb > 1 else cap, room // stage))
TILES = {(64, 32): 1, (64, 48): 1, (64, 64): 1, (64, 96): 1, (64, 128): 1, (64, 192): 1, (64, 256): 1, (128, 32): 2, (128, 64): 2, (128, 96): 2,
         (128, 128): 2, (128, 192): 2, (128, 256): 2, (192, 64): 3, (192, 96): 3, (192, 128): 3, (192, 192): 3, (256, 32): 2, (256, 64): 2, (256, 128): 2}
def wave(bm, bn, kb, **kw):
    nwg = kw.pop("NWG", None) or TILES[(bm, bn)]
    ck, sl, cm, cn, mc = kw.get("CK", 1), kw.get("SL", 1), kw.get("CM", 1), kw.get("CN", 1), kw.get("MC", 1)
    na = bn // 2; r = bm // 64 // nwg * na
    if r % ck or (r // ck) % sl or (r // ck // sl) % 2: return
    for q in (r // ck, r // ck // sl):
        if q >= 4 and q % 4: return
    rl = r // ck // sl
    if rl > na and rl % na: return
    if rl < na and na % rl: return
    st = min(stages(bm, bn, kb, ck, kw.get("MINB", 1), cap=16), kw.pop("STAGES", 99))
    if st < 2: return
    for c, side in ((cm, bn), (cn, bm)):
        if mc and c > 1 and (side // c) % 8: return
    kw = {k: v for k, v in kw.items() if v != {"CM": 1, "CN": 1, "CK": 1, "SL": 1, "MC": 1, "LOCAL": 0, "SWAP": 0, "MINB": 1, "L2X": 0}.get(k, None)}
    add("gemm_wave.cu", "wave", BM=bm, BN=bn, KB=kb, STAGES=st, NWG=nwg, **kw)
def kbs(bm, bn): return tuple(kb for kb in (1, 2, 4) if 2 * kb * (bm + bn) * 128 <= 230000 and (kb < 4 or bm * bn <= 8192))
def set_wave():
    for t in TILES:
        for kb in kbs(*t):
            wave(*t, kb)
            for cm, cn in ((2, 1), (1, 2)):
                for loc in (0, 1): wave(*t, kb, CM=cm, CN=cn, LOCAL=loc)
    for t in ((64, 64), (64, 96), (64, 128), (128, 64), (128, 96), (128, 128)): wave(*t, 1, MINB=2); wave(*t, 2, MINB=2)
    for t in ((64, 128), (128, 128), (128, 256), (192, 128)):
        for cm, cn in ((1, 1), (1, 2)): wave(*t, kbs(*t)[-1], CM=cm, CN=cn, TB=1)
def set_split():
    for t in TILES:
        area = t[0] * t[1]
        for kb in kbs(*t):
            for ck in (2, 3, 4, 8): wave(*t, kb, CK=ck)
            for sl in (2, 3, 4, 6, 8, 12, 16):
                for x in (0, 1):
                    if (x == 0 and area > 128 * 128) or (x == 1 and area < 64 * 128) or (kb == 4 and sl > 8): continue
                    wave(*t, kb, SL=sl, L2X=x)
                    if area >= 8192 and kb < 4 and sl in (2, 4, 8):
                        for cm, cn in ((2, 1), (1, 2)): wave(*t, kb, SL=sl, L2X=x, CM=cm, CN=cn)
        for kb in kbs(*t)[:2]:
            for sl in (2, 4, 8):
                if area <= 128 * 128: wave(*t, kb, CK=2, SL=sl, L2X=0)
                if area >= 128 * 128: wave(*t, kb, CK=2, SL=sl, L2X=1)
        for sl in (2, 4): wave(*t, kbs(*t)[-1], CK=4, SL=sl); wave(*t, kbs(*t)[-1], CK=8, SL=sl)
def set_swap():
    for bm, nwg in ((64, 1), (128, 2), (192, 3), (256, 2)):
        for bn in (32, 48, 64, 96, 128, 192):
            if bm * bn > 256 * 128: continue
            TILES.setdefault((bm, bn), nwg)
            for kb, (cm, cn) in itertools.product(kbs(bm, bn)[:2], ((1, 1), (2, 1), (1, 2))): wave(bm, bn, kb, SWAP=1, CM=cm, CN=cn, LOCAL=1 if cm * cn > 1 else 0, NWG=nwg)
def pers(bm, bn, nwg, pp, cm, cn, outb=2, **kw):
    st = stages(bm, bn, 1, outb=nwg * outb * (bn * 128 if kw.get('SWAP') or kw.get('WGSTORE') else 128 * (64 if bn % 64 == 0 else 80 if bn % 80 == 0 else bn)), cap=10)
    if st >= 3: add("gemm_persistent.cu", "persistent", BM=bm, BN=bn, NWG=nwg, PINGPONG=pp, CM=cm, CN=cn, STAGES=st, OUT=outb, **kw)
def set_pers():
    for bm, bn, nwg, pp in ((128, 256, 2, 0), (128, 192, 2, 0), (128, 128, 2, 0), (256, 128, 2, 0), (256, 96, 2, 0), (256, 144, 2, 0), (256, 160, 2, 0), (256, 192, 2, 0), (192, 192, 3, 0), (192, 128, 3, 0),
                            (64, 256, 2, 1), (64, 192, 2, 1), (64, 128, 2, 1), (128, 96, 2, 1), (128, 112, 2, 1), (128, 128, 2, 1), (128, 144, 2, 1), (128, 160, 2, 1), (128, 176, 2, 1), (128, 192, 2, 1)):
        for cm, cn in ((1, 1), (2, 1), (1, 2)):
            for o in (1, 2): pers(bm, bn, nwg, pp, cm, cn, o)
def set_probe():
    for b in (1, 8):
        for sh in (1, 16):
            for m in ((0, 1) if b == 1 else ()) + (2, 3): add("../experiments/probe_latency.cu", "probe", MODE=m, BOXES=b, SHARE=sh)
            for m in (5,) + ((6,) if b == 1 else (4,)): add("../experiments/probe_latency.cu", "probe", MODE=m, BOXES=b, SHARE=max(2, sh), CM=2)
def set_resident():
    for bm, bn, nwg in ((64, 8, 1), (64, 16, 1), (64, 24, 1), (64, 32, 1), (64, 48, 1), (64, 64, 1), (64, 96, 1), (64, 128, 1), (128, 16, 2), (128, 32, 2), (128, 64, 2), (128, 96, 2), (128, 128, 2)):
        for kwg in (1, 2, 4):
            if nwg * kwg <= 4 and (bn // 2) % 4 == 0: add("../experiments/gemm_resident.cu", "resident", BM=bm, BN=bn, NWG=nwg, KWG=kwg)
        if bn >= 32: add("../experiments/gemm_resident.cu", "resident", BM=bm, BN=bn, NWG=nwg, KWG=1, MINB=2)
def set_mma():
    for mi, nj, ks, wk in ((1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 4, 1), (1, 2, 1, 1), (1, 2, 2, 1), (1, 2, 4, 1), (1, 4, 2, 1), (2, 4, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (1, 2, 1, 2), (1, 2, 2, 2), (1, 2, 1, 4), (1, 2, 2, 4), (1, 2, 4, 4),
                           (1, 4, 1, 4), (1, 4, 2, 4), (2, 4, 1, 4), (2, 4, 2, 4), (1, 4, 4, 4), (1, 4, 1, 8), (1, 4, 2, 8), (1, 4, 4, 8), (2, 4, 1, 8), (2, 4, 2, 8), (2, 2, 1, 4), (2, 2, 2, 4), (2, 2, 1, 8), (2, 2, 2, 8), (2, 2, 4, 8)):
        for wm, wn in ((1, 1), (1, 2), (2, 1), (2, 2)):
            if wm * wn * wk > 16 or (mi * nj * 4) // wk < 2 or wm * wn * wk * mi * nj * 512 > 48000 and wk > 1: continue
            for once in (0, 1): add("gemm_mma.cu", "mma", MI=mi, NJ=nj, KS=ks, WM=wm, WN=wn, WK=wk, **({"ONCE": 1} if once else {}))
            if True: add("gemm_mma.cu", "mma", MI=mi, NJ=nj, KS=ks, WM=wm, WN=wn, WK=wk, ONCE=1, PDL=0)
def set_pers2():
    for bm, bn, nwg, pp in ((128, 256, 2, 0), (256, 128, 2, 0), (256, 160, 2, 0), (256, 192, 2, 0), (192, 128, 3, 0), (192, 192, 3, 0), (128, 192, 2, 0), (128, 128, 2, 0),
                            (64, 64, 2, 1), (64, 96, 2, 1), (64, 128, 2, 1), (64, 192, 2, 1), (64, 256, 2, 1), (128, 80, 2, 1), (128, 96, 2, 1), (128, 104, 2, 1), (128, 112, 2, 1), (128, 120, 2, 1), (128, 128, 2, 1),
                            (128, 136, 2, 1), (128, 144, 2, 1), (128, 152, 2, 1), (128, 160, 2, 1), (128, 168, 2, 1), (128, 176, 2, 1), (128, 184, 2, 1), (128, 192, 2, 1)):
        for cm, cn in ((1, 1), (2, 1), (1, 2)):
            if bn % (8 * cm) == 0 and (bn // cm) % 8 == 0: pers(bm, bn, nwg, pp, cm, cn, 1)
        if bn in (64, 96, 128): pers(bm, bn, nwg, pp, 1, 1, 2)
    for bm, bn in ((64, 96), (64, 192), (128, 96), (128, 112), (128, 144), (128, 160), (128, 176), (128, 192)):
        for cm, cn in ((1, 1), (2, 1), (1, 2)): pers(bm, bn, 2, 1, cm, cn, 1, SWAP=1)
def set_rowmajor():
    for t in ((64, 64), (64, 128), (64, 192), (64, 256), (128, 64), (128, 128), (128, 192), (128, 256), (192, 64), (192, 128), (256, 64), (256, 128)):
        for kb in kbs(*t)[:2]:
            for cm, cn in ((1, 1), (2, 1), (1, 2)):
                if cm == 1 or t[1] % 128 == 0: wave(*t, kb, CM=cm, CN=cn, TB=1)
            if t[0] * t[1] <= 128 * 256 and t[0] <= 128:
                wave(*t, kb, CK=2, TB=1); wave(*t, kb, CK=4, TB=1)
                for sl in (2, 4, 8):
                    if t[0] * t[1] <= 128 * 128: wave(*t, kb, SL=sl, TB=1)
                    if t[0] * t[1] >= 64 * 128:
                        wave(*t, kb, SL=sl, L2X=1, TB=1); wave(*t, kb, SL=sl, L2X=1, CN=2, TB=1)
                        if t[1] % 128 == 0: wave(*t, kb, SL=sl, L2X=1, CM=2, TB=1)
    for bm, bn, pp in ((128, 256, 0), (256, 128, 0), (128, 128, 0), (256, 192, 0), (64, 64, 1), (64, 128, 1), (64, 192, 1), (64, 256, 1), (128, 64, 1), (128, 128, 1), (128, 192, 1)):
        for cm, cn in ((1, 1), (2, 1), (1, 2)):
            if cm == 1 or bn % 128 == 0: pers(bm, bn, 2, pp, cm, cn, 1, TB=1)
def set_store():
    for bm, bn, pp in ((128, 192, 1), (128, 128, 1), (128, 160, 1), (128, 144, 1), (128, 176, 1), (128, 256, 0), (64, 256, 1), (128, 128, 0), (128, 192, 0), (192, 128, 0)):
        for cm, cn in ((1, 1), (2, 1), (1, 2)):
            for o in (2, 3): pers(bm, bn, 3 if bm == 192 else 2, pp, cm, cn, o)
            if bn % 64 == 0:
                for o in (1, 2): pers(bm, bn, 3 if bm == 192 else 2, pp, cm, cn, o, WGSTORE=1)
                pers(bm, bn, 3 if bm == 192 else 2, pp, cm, cn, 1, WGSTORE=1, HINT=1)
    for bm, bn in ((128, 96), (128, 144), (128, 176), (128, 192)):
        for cm, cn in ((1, 1), (2, 1)): pers(bm, bn, 2, 1, cm, cn, 2, SWAP=1)
def set_profile2():
    pers(128, 160, 2, 1, 1, 1, 1, SWAP=1); pers(128, 160, 2, 1, 2, 1, 1, SWAP=1)
def set_profile():
    pers(128, 160, 2, 1, 2, 1, 1); pers(128, 192, 2, 1, 2, 1, 1); pers(128, 128, 2, 1, 2, 1, 1); pers(128, 144, 2, 1, 2, 1, 1); pers(128, 256, 2, 0, 2, 1, 1); pers(64, 256, 2, 1, 2, 1, 1)
if __name__ == "__main__":
    folder, names = sys.argv[1], sys.argv[2].split("+")
    for n in names: globals()["set_" + n]()
    seen, man, build = set(), [], []
    for src, kind, kw in out:
        key = (src, tuple(sorted(kw.items())))
        if key in seen: continue
        seen.add(key); path = f"{folder}/k{len(seen)}.cubin"
        flags = " ".join(f"-D{k}={v}" for k, v in kw.items())
        build.append(f"nvcc -O3 -std=c++17 -DNDEBUG -gencode=arch=compute_90a,code=sm_90a -cubin -Xptxas -v -Ikernels {flags} kernels/{src} -o {path} >{path}.log 2>&1 || echo FAIL {src} {flags}")
        man.append(f"{path} {kind} " + " ".join(f"{k}={v}" for k, v in kw.items()))
    open(f"{folder}/build.txt", "w").write("\n".join(build) + "\n"); open(f"{folder}/manifest.txt", "w").write("\n".join(man) + "\n")
    print(len(man), "variants")
