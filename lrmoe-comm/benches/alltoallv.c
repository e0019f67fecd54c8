/* Times MPI_Alltoallv. Usage: mpirun -n RANKS alltoallv ROUNDS WORK BYTES...
 * For each size of a message between two ranks, rank 0 prints the size and the median seconds of a call over ROUNDS rounds, in each of which a
 * rank moves about WORK bytes. The first round is not counted. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int rank, ranks;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int rounds = atoi(argv[1]);
    long work = atol(argv[2]);
    double *seconds = malloc(rounds * sizeof *seconds);
    int *counts = malloc(ranks * sizeof *counts), *starts = malloc(ranks * sizeof *starts);
    for (int arg = 3; arg < argc; arg++) {
        long bytes = atol(argv[arg]);
        int len = (int)(bytes / sizeof(float));
        long calls = work / (bytes * ranks);
        calls = calls < 1 ? 1 : calls > 8192 ? 8192 : calls;
        float *send = malloc(bytes * ranks), *recv = malloc(bytes * ranks);
        for (long i = 0; i < (long)len * ranks; i++) {
            send[i] = 1;
            recv[i] = 0;
        }
        for (int peer = 0; peer < ranks; peer++) {
            counts[peer] = len;
            starts[peer] = peer * len;
        }
        for (int round = -1; round < rounds; round++) {
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            for (long call = 0; call < calls; call++)
                MPI_Alltoallv(send, counts, starts, MPI_FLOAT, recv, counts, starts, MPI_FLOAT, MPI_COMM_WORLD);
            MPI_Barrier(MPI_COMM_WORLD);
            if (round >= 0)
                seconds[round] = (MPI_Wtime() - start) / calls;
        }
        qsort(seconds, rounds, sizeof *seconds, ascending);
        if (rank == 0)
            printf("%ld %.9g\n", bytes, seconds[rounds / 2]);
        free(send);
        free(recv);
    }
    free(seconds);
    free(counts);
    free(starts);
    MPI_Finalize();
    return 0;
}
