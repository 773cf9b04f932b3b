//! Our own daemon.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use super::{Subject, Work};
use crate::{
    error::Failure,
    machine,
    process::{self, Daemon},
};

/// What our daemon is to serve.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setup {
    text: String,
}

impl Setup {
    /// A volume and a device of the same name with it, whose socket is in a folder of that name.
    #[must_use]
    pub(crate) fn disk(self, name: &str, backend: &str, size: &str) -> Self {
        self.volume(name, backend, size).device(name, name, "shared")
    }

    /// A volume: a stack of services over back ends, or a back end.
    #[must_use]
    pub(crate) fn volume(mut self, name: &str, stack: &str, size: &str) -> Self {
        let _ = writeln!(self.text, "[[volume]]\nname = \"{name}\"\nsize = \"{size}\"\nstack = \"{stack}\"\n");
        self
    }

    /// As [`Self::disk`], of blocks of so many bytes; 0: of 512.
    #[must_use]
    pub(crate) fn disk_in_blocks(mut self, name: &str, stack: &str, size: &str, block_size: u32) -> Self {
        if block_size == 0 {
            return self.disk(name, stack, size);
        }
        let _ = writeln!(
            self.text,
            "[[volume]]\nname = \"{name}\"\nsize = \"{size}\"\nblock_size = {block_size}\nstack = \"{stack}\"\n"
        );
        self.device(name, name, "shared")
    }

    /// A device with a volume.
    #[must_use]
    pub(crate) fn device(mut self, name: &str, volume: &str, doorbells: &str) -> Self {
        let _ = writeln!(
            self.text,
            "[[device]]\nname = \"{name}\"\nsocket = \"FOLDER/{name}/cntrl\"\nnvme = {{ queues = 4, doorbells = \"{doorbells}\" }}\n\
             attach = [{{ volume = \"{volume}\", nsid = 1 }}]\n"
        );
        self
    }

    /// A virtio disk with a volume, whose socket has its name.
    #[must_use]
    pub(crate) fn virtio(mut self, name: &str, volume: &str) -> Self {
        let _ = writeln!(
            self.text,
            "[[device]]\nname = \"{name}\"\nsocket = \"FOLDER/{name}\"\nvirtio_blk = {{ queues = 1 }}\n\
             attach = [{{ volume = \"{volume}\" }}]\n"
        );
        self
    }

    /// With a worker of its own for each device.
    #[must_use]
    pub(crate) fn isolated(self) -> Self {
        Self { text: format!("isolation = \"device\"\n\n{}", self.text) }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.text.lines().filter_map(|line| line.strip_prefix("socket = \"FOLDER/")?.strip_suffix("/cntrl\""))
    }
}

/// `millrace serve` with one shard on one core.
#[derive(Debug)]
pub(crate) struct Ours {
    binary: PathBuf,
    folder: PathBuf,
    daemon: Daemon,
}

impl Ours {
    /// Starts it in a folder; `polling` is `spin` or `adaptive`.
    pub(crate) fn start(binary: &Path, folder: &Path, core: usize, polling: &str, setup: &Setup) -> Result<Self, Failure> {
        Self::start_on(binary, folder, &format!("{core}-{core}"), polling, setup)
    }

    /// Starts it with one shard on each of some cores.
    pub(crate) fn start_on(
        binary: &Path,
        folder: &Path,
        cores: &str,
        polling: &str,
        setup: &Setup,
    ) -> Result<Self, Failure> {
        let make = |path: &Path| fs::create_dir_all(path).map_err(|source| Failure::Write { path: path.to_owned(), source });
        // What an earlier section left there is not this one's.
        let _ = fs::remove_dir_all(folder);
        make(folder)?;
        for name in setup.names() {
            make(&folder.join(name))?;
        }
        let config = folder.join("config.toml");
        let text = setup.text.replace("FOLDER", &folder.display().to_string());
        fs::write(&config, text).map_err(|source| Failure::Write { path: config.clone(), source })?;
        let mut command = Command::new(binary);
        command.args(["serve", "--polling", polling, "--shards", cores, "--config"]).arg(&config);
        command.arg("--state-dir").arg(folder.join("state")).arg("--run-dir").arg(folder.join("run"));
        let ready = || {
            let mut status = Command::new(binary);
            process::output(status.arg("status").arg("--run-dir").arg(folder.join("run"))).is_ok()
        };
        let daemon = Daemon::start(&mut command, &folder.join("serve.log"), ready)?;
        Ok(Self { binary: binary.to_owned(), folder: folder.to_owned(), daemon })
    }

    /// `millrace status --json`.
    pub(crate) fn status(&self) -> Result<Value, Failure> {
        self.json(&["status"])
    }

    /// What a command of the client answers with `--json`.
    pub(crate) fn json(&self, words: &[&str]) -> Result<Value, Failure> {
        let mut command = Command::new(&self.binary);
        let said = process::output(command.args(words).args(["--json", "--run-dir"]).arg(self.folder.join("run")))?;
        serde_json::from_str(&said).map_err(|_| Failure::Output { program: format!("millrace {}", words.join(" ")), said })
    }

    /// What the daemon has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.folder.join("serve.log")).unwrap_or_default()
    }
}

impl Subject for Ours {
    fn name(&self) -> &'static str {
        "ours"
    }

    fn folder(&self, device: &str) -> PathBuf {
        self.folder.join(device)
    }

    fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    fn work(&self) -> Result<Work, Failure> {
        let status = self.status()?;
        let shards = status["shards"].as_array().into_iter().flatten();
        let (busy, commands) = shards.fold((0.0, 0.0), |(busy, commands), shard| {
            (busy + shard["busy_ns"].as_f64().unwrap_or(0.0), commands + shard["commands"].as_f64().unwrap_or(0.0))
        });
        Ok(Work { busy_cycles: busy * machine::cycles_per_ns(), commands })
    }
}
