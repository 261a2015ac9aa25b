"""Trains a small network with torch: on a GPU where there is one, on the CPU elsewhere. It knows nothing of aimgpu.

aimgpu exec --memory 2GiB --priority low -- python examples/train.py
"""

import sys

import torch


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB to use")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        inputs = torch.randn(1024, 64, device=device)
        loss = torch.nn.functional.mse_loss(network(inputs).squeeze(1), inputs.square().sum(1).sqrt())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} on {device.type}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
