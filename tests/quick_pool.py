"""A process of a pool that says at once, and often, that it waits for the lock."""

from cuda_l2.runs import pool_worker

if __name__ == "__main__":
    pool_worker.TICK_S = 0.01
    pool_worker.main()
