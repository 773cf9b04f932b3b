//! Who asks: our own clients, SPDK's, and fio.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::{error::Failure, process, record::Sample, subject::Tree};

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    /// `randread`, `randwrite`, `read` or `write`.
    pub(crate) rw: &'static str,
    /// Bytes of a command, as on the command line.
    pub(crate) bs: &'static str,
    /// Commands in flight per device.
    pub(crate) depth: u32,
    /// What else is to be said of it: where the blocks are, how many devices.
    pub(crate) place: &'static str,
}

impl Load {
    /// Random reads of 4 KiB.
    pub(crate) fn randread(depth: u32) -> Self {
        Self::new("randread", "4k", depth)
    }

    /// Of a kind, with a size.
    pub(crate) fn new(rw: &'static str, bs: &'static str, depth: u32) -> Self {
        Self { rw, bs, depth, place: "" }
    }

    /// The same, somewhere.
    pub(crate) fn on(self, place: &'static str) -> Self {
        Self { place, ..self }
    }

    /// In words.
    pub(crate) fn name(&self) -> String {
        let blank = if self.place.is_empty() { "" } else { " " };
        format!("{} {}{blank}{}", self.rw, self.bs, self.place)
    }
}

/// How our lean client runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lean {
    /// Extra options: `--still`, `--latency`, `--rate` …
    pub(crate) options: Vec<String>,
}

impl Lean {
    /// With these options, separated by blanks.
    pub(crate) fn with(options: &str) -> Self {
        Self { options: options.split_whitespace().map(str::to_owned).collect() }
    }

    /// Runs it against some devices.
    pub(crate) fn run(
        &self,
        binary: &Path,
        sockets: &[PathBuf],
        load: &Load,
        core: usize,
        seconds: f64,
    ) -> Result<Sample, Failure> {
        let mut command = Command::new(binary);
        command.args(["bench", "--lean", "--json", "--rw", load.rw, "--bs", load.bs]);
        command.args(["--qd", &load.depth.to_string(), "--time", &seconds.to_string(), "--core", &core.to_string()]);
        command.args(&self.options);
        for socket in sockets {
            command.arg("--socket").arg(socket);
        }
        let said = process::output(&mut command)?;
        lean_sample(&said).ok_or(Failure::Output { program: "millrace bench".into(), said })
    }
}

fn lean_sample(said: &str) -> Option<Sample> {
    let report: Value = serde_json::from_str(said).ok()?;
    let mut sample = Sample::new();
    sample.insert("iops".into(), report["total"]["iops"].as_f64()?);
    sample.insert("commands".into(), report["total"]["commands"].as_f64()?);
    sample.insert("spread".into(), report["fairness"]["spread"].as_f64()?);
    for (name, value) in report["latency_ns"].as_object()? {
        if name != "samples" {
            sample.insert(name.clone(), value.as_f64()?);
        }
    }
    if let Some(interrupts) = report["interrupts"].as_f64() {
        sample.insert("interrupts".into(), interrupts / report["total"]["commands"].as_f64()?.max(1.0));
    }
    Some(sample)
}

/// Runs SPDK's own client, as it is, against one device. It measures whole seconds.
pub(crate) fn perf(tree: &Tree, folder: &Path, load: &Load, core: usize, seconds: f64) -> Result<Sample, Failure> {
    let mut command = tree.program("spdk_nvme_perf");
    let bytes = if load.bs == "128k" { "131072" } else { "4096" };
    command.args(["-g", "-s", "256", "-c", &format!("[{core}]"), "-q", &load.depth.to_string(), "-o", bytes, "-w", load.rw]);
    command.args(["-t", &format!("{:.0}", seconds.ceil()), "-r"]);
    command.arg(format!("trtype:VFIOUSER traddr:{} subnqn:ANY", folder.display()));
    let said = process::output(&mut command)?;
    perf_sample(&said).ok_or(Failure::Output { program: "spdk_nvme_perf".into(), said })
}

/// The line of the total: IOPS, MiB/s, and mean, least and largest latency in microseconds.
fn perf_sample(said: &str) -> Option<Sample> {
    let line = said.lines().find_map(|line| line.trim_start().strip_prefix("Total")?.trim_start().strip_prefix(':'))?;
    let values: Vec<f64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
    let [iops, _, mean, ..] = values[..] else { return None };
    Some(Sample::from([("iops".to_owned(), iops), ("mean".to_owned(), mean * 1000.0)]))
}

/// fio with its own io_uring engine on a file.
#[derive(Clone, Debug)]
pub(crate) struct Fio(pub(crate) PathBuf);

impl Fio {
    /// Runs it on one core; `engine` is the engine's options, with the file's name where it needs one.
    pub(crate) fn run(&self, engine: &[String], load: &Load, core: usize, seconds: f64) -> Result<Sample, Failure> {
        self.run_beside(None, engine, load, core, seconds)
    }

    /// As [`run`](Self::run), for an engine that asks our daemon in a run directory.
    pub(crate) fn run_beside(
        &self,
        run_dir: Option<&Path>,
        engine: &[String],
        load: &Load,
        core: usize,
        seconds: f64,
    ) -> Result<Sample, Failure> {
        let mut command = Command::new(&self.0);
        command.envs(run_dir.map(|dir| ("MILLRACE_RUN_DIR", dir)));
        command.args(["fio", "--name=bench", "--output-format=json", "--direct=1", "--time_based", "--ramp_time=100ms"]);
        command.args(["--lat_percentiles=1", "--clat_percentiles=0"]);
        command.args([format!("--rw={}", load.rw), format!("--bs={}", load.bs)]);
        command.args([format!("--iodepth={}", load.depth), format!("--runtime={:.0}ms", seconds * 1000.0)]);
        command.args([
            format!("--cpus_allowed={core}"),
            "--group_reporting".into(),
            "--randrepeat=0".into(),
            "--norandommap".into(),
        ]);
        command.args(engine);
        let said = process::output(&mut command)?;
        fio_sample(&said, load.rw).ok_or(Failure::Output { program: "fio".into(), said })
    }
}

fn fio_sample(said: &str, rw: &str) -> Option<Sample> {
    let report: Value = serde_json::from_str(said.get(said.find('{')?..)?).ok()?;
    let job = &report["jobs"][0][if rw.ends_with("read") { "read" } else { "write" }];
    // From the call on: what an engine does while it submits is left out of `clat_ns`.
    let latency = &job["lat_ns"];
    let mut sample = Sample::from([("iops".to_owned(), job["iops"].as_f64()?)]);
    sample.insert("mean".into(), latency["mean"].as_f64()?);
    let cpu = |kind: &str| report["jobs"][0][kind].as_f64();
    if let (Some(user), Some(system)) = (cpu("usr_cpu"), cpu("sys_cpu")) {
        sample.insert("client_core".into(), (user + system) / 100.0);
    }
    for (name, key) in [("p50", "50.000000"), ("p99", "99.000000"), ("p99.9", "99.900000")] {
        if let Some(value) = latency["percentile"][key].as_f64() {
            sample.insert(name.into(), value);
        }
    }
    Some(sample)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_spdks_client_is_found() {
        let said = "Latency(us)\nDevice Information : IOPS MiB/s Average min max\n\
                    VFIOUSER (/x) NSID 1 from core 0: 8300000.10 32421.88 3.85 1.2 900.1\n\
                    Total                         : 8300000.10 32421.88 3.85 1.2 900.1\n";
        let sample = perf_sample(said).unwrap();
        assert!((sample["iops"] - 8_300_000.1).abs() < 0.01 && (sample["mean"] - 3850.0).abs() < 0.01);
        assert_eq!(perf_sample("Total : nothing"), None);
    }

    #[test]
    fn fios_report_is_read_past_its_notes() {
        let said = r#"note: both iodepth >= 1 and synchronous
            {"jobs": [{"read": {"iops": 1000.5, "lat_ns": {"mean": 900.0, "percentile": {"99.900000": 5000}}}}]}"#;
        let sample = fio_sample(said, "randread").unwrap();
        assert!((sample["iops"] - 1000.5).abs() < 0.01 && (sample["p99.9"] - 5000.0).abs() < 0.01);
        assert_eq!(fio_sample(said, "randwrite"), None);
    }
}
