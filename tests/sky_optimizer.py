"""Asks SkyPilot's optimizer, in an interpreter that has SkyPilot and with HOME in an empty folder.

Reads {case: resources of a task} as JSON, and prints {case: [cloud, instance type, spot, price of
an hour], or the name of the error}. Prices and clouds are those below: it asks no network."""

import json
import sys
from pathlib import Path

CLOUDS = ("RunPod", "Vast")
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
FILES = {
    "vast/vms.csv": f"""{HEADER}
1x_T4,T4,1,4,16,,0.15,,US,US-1
1x_A10,A10,1,8,32,,0.35,,US,US-1
1x_A100,A100,1,16,64,,1.29,,US,US-1
1x_H100,H100,1,26,200,,2.49,,US,US-1
2x_H100,H100,2,52,400,,4.98,,US,US-1
4x,,,4,16,,0.10,,US,US-1
""",
    "runpod/vms.csv": f"""{HEADER}
1x_L4,L4,1,4,24,,0.44,0.22,US,US-1
1x_A100-80GB,A100-80GB,1,8,80,,1.64,0.80,US,US-1
2x_A100-80GB,A100-80GB,2,16,160,,3.28,1.60,US,US-1
1x_H100,H100,1,16,80,,2.69,1.25,US,US-1
1x_H200,H200,1,16,140,,3.59,,US,US-1
""",
    "common/metadata.csv": """GPU,MemoryGB,Manufacturer
T4,16,NVIDIA
A10,24,NVIDIA
L4,24,NVIDIA
A100,40,NVIDIA
A100-80GB,80,NVIDIA
H100,80,NVIDIA
H200,141,NVIDIA
""",
    "common/accelerators.csv": """AcceleratorName,Clouds
T4,['Vast']
A10,['Vast']
A100,['Vast']
L4,['RunPod']
A100-80GB,['RunPod']
H100,"['RunPod', 'Vast']"
H200,['RunPod']
""",
}


def main() -> None:
    for name, text in FILES.items():
        path = Path.home() / ".sky/catalogs/v8" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    names = [cloud.lower() for cloud in CLOUDS]
    (Path.home() / ".sky/config.yaml").write_text(json.dumps({"allowed_clouds": names}))

    from sky import exceptions, global_user_state  # noqa: PLC0415
    from sky.clouds.cloud import CloudCapability  # noqa: PLC0415
    from sky.optimizer import Optimizer  # noqa: PLC0415
    from sky.utils import dag_utils  # noqa: PLC0415

    global_user_state.set_allowed_clouds(names, "default")
    global_user_state.set_enabled_clouds(list(CLOUDS), CloudCapability.COMPUTE, "default")
    chosen = {}
    for case, resources in json.load(sys.stdin).items():
        task = json.dumps({"name": "case", "resources": resources, "run": "true"})
        dag = dag_utils.load_dag_from_yaml_str(task)
        try:
            best = Optimizer.optimize(dag, quiet=True).tasks[0].best_resources
        except exceptions.ResourcesUnavailableError as error:
            chosen[case] = type(error).__name__
        else:
            price = round(best.get_cost(3600), 2)
            chosen[case] = [str(best.cloud), best.instance_type, best.use_spot, price]
    print(f"\n{json.dumps(chosen)}")  # noqa: T201


if __name__ == "__main__":
    main()
