"""FlashInfer, ragged prefill with the fa3 backend: NaN in one sequence's V reaches the
output of the sequence before it, whose last tile holds keys of the next.

The keys of the neighbour have probability 0, and 0 times NaN is NaN. Memory that was
never written, or one request with NaN, so spoils another request.

Needs FlashInfer and a Hopper GPU. Exit code 1: it shows; 0: it does not; 3: it could not
be measured."""

import sys

import torch

HEADS, DIM, SEQUENCES = 8, 128, 4


def main() -> int:
    try:
        import flashinfer
    except ImportError:
        print("expected flashinfer, got none")
        return 3
    if not torch.cuda.is_available():
        print("expected a CUDA GPU, got none")
        return 3
    shows = False
    print(f"flashinfer {flashinfer.__version__}, torch {torch.__version__}")
    print(torch.cuda.get_device_name())
    options = {"device": "cuda", "dtype": torch.bfloat16}
    for backend in ("fa3", "fa2"):
        for keys in (128, 192, 1000, 1024, 8192):
            torch.manual_seed(0)
            q = torch.randn(SEQUENCES, HEADS, DIM, **options)
            k, v = torch.randn(2, SEQUENCES * keys, HEADS, DIM, **options)
            v[keys : 2 * keys] = torch.nan  # sequence 1 alone
            each = torch.arange(SEQUENCES + 1, device="cuda", dtype=torch.int32)
            space = torch.empty(2**28, device="cuda", dtype=torch.uint8)
            wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                space, "NHD", backend=backend
            )
            wrapper.plan(each, each * keys, HEADS, HEADS, DIM, q_data_type=torch.bfloat16)
            bad = wrapper.run(q, k, v)[0].isnan().float().mean().item()
            print(f"{backend}, {keys} keys: {bad:.0%} of sequence 0 is NaN")
            shows |= bad > 0
    return int(shows)


if __name__ == "__main__":
    sys.exit(main())
