//! SPDK's target, from a tree that somebody else has built.

use std::{
    fs,
    io::Write as _,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use serde_json::{Value, json};

use super::{Subject, Work};
use crate::{error::Failure, process::Daemon};

/// A built tree of SPDK.
#[derive(Clone, Debug)]
pub(crate) struct Tree(PathBuf);

impl Tree {
    /// The tree, if its target and its client are there.
    pub(crate) fn find(path: &Path) -> Option<Self> {
        let built = ["nvmf_tgt", "spdk_nvme_perf"].iter().all(|name| path.join("build/bin").join(name).is_file());
        built.then(|| Self(path.to_owned()))
    }

    /// A program of the tree with its libraries.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.0.join("build/bin").join(name));
        let libraries =
            [self.0.join("build/lib"), self.0.join("build/libvfio-user/build-release/lib"), self.0.join("dpdk/build/lib")];
        let libraries = libraries.map(|path| path.display().to_string()).join(":");
        command.env("LD_LIBRARY_PATH", libraries);
        command
    }

    /// The commit or version that it was built from.
    pub(crate) fn version(&self) -> String {
        fs::read_to_string(self.0.join("VERSION")).map_or_else(|_| "unknown".into(), |text| text.trim().to_owned())
    }
}

/// `nvmf_tgt` on one core, with vfio-user devices, or `vhost` with virtio disks.
#[derive(Debug)]
pub(crate) struct Spdk {
    folder: PathBuf,
    daemon: Daemon,
}

impl Spdk {
    /// Starts it with `megabytes` of huge pages, without devices.
    pub(crate) fn start(tree: &Tree, folder: &Path, core: usize, megabytes: usize) -> Result<Self, Failure> {
        let spdk = Self::run(tree.program("nvmf_tgt"), folder, core, megabytes)?;
        spdk.call("nvmf_create_transport", &json!({ "trtype": "VFIOUSER" }))?;
        Ok(spdk)
    }

    /// Starts the target for virtio disks, without any; `None` where the tree was built without it.
    pub(crate) fn start_vhost(tree: &Tree, folder: &Path, core: usize, megabytes: usize) -> Result<Option<Self>, Failure> {
        let mut command = tree.program("vhost");
        if !Path::new(command.get_program()).is_file() {
            return Ok(None);
        }
        command.arg("-S").arg(folder);
        Self::run(command, folder, core, megabytes).map(Some)
    }

    fn run(mut command: Command, folder: &Path, core: usize, megabytes: usize) -> Result<Self, Failure> {
        // What an earlier section left there is not this one's.
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder).map_err(|source| Failure::Write { path: folder.to_owned(), source })?;
        let socket = folder.join("rpc.sock");
        command.args(["-m", &format!("[{core}]"), "-s", &megabytes.to_string(), "-r"]).arg(&socket);
        let ready = || call(&socket, "spdk_get_version", &Value::Null).is_ok();
        let daemon = Daemon::start(&mut command, &folder.join("spdk.log"), ready)?;
        Ok(Self { folder: folder.to_owned(), daemon })
    }

    fn call(&self, method: &str, parameters: &Value) -> Result<Value, Failure> {
        call(&self.folder.join("rpc.sock"), method, parameters)
    }

    /// Makes a null bdev.
    pub(crate) fn null(&self, name: &str, bytes: u64) -> Result<(), Failure> {
        let parameters = json!({ "name": name, "num_blocks": bytes / 512, "block_size": 512 });
        self.call("bdev_null_create", &parameters).map(drop)
    }

    /// Makes a bdev in memory.
    pub(crate) fn memory(&self, name: &str, bytes: u64) -> Result<(), Failure> {
        self.memory_in_blocks(name, bytes, 512)
    }

    /// The same, of blocks of so many bytes.
    pub(crate) fn memory_in_blocks(&self, name: &str, bytes: u64, block_size: u64) -> Result<(), Failure> {
        let parameters = json!({ "name": name, "num_blocks": bytes / block_size, "block_size": block_size });
        self.call("bdev_malloc_create", &parameters).map(drop)
    }

    /// Makes a bdev of a file: libaio.
    pub(crate) fn file(&self, name: &str, path: &Path) -> Result<(), Failure> {
        let parameters = json!({ "name": name, "filename": path, "block_size": 512 });
        self.call("bdev_aio_create", &parameters).map(drop)
    }

    /// Makes a bdev that passes everything on.
    pub(crate) fn passthru(&self, name: &str, base: &str) -> Result<(), Failure> {
        self.call("bdev_passthru_create", &json!({ "name": name, "base_bdev_name": base })).map(drop)
    }

    /// Makes an array of bdevs; `strip` in KiB, 0 where there are no strips.
    pub(crate) fn raid(&self, name: &str, level: &str, strip: u32, bases: &[&str]) -> Result<(), Failure> {
        let mut parameters = json!({ "name": name, "raid_level": level, "base_bdevs": bases });
        if strip > 0 {
            parameters["strip_size_kb"] = strip.into();
        }
        self.call("bdev_raid_create", &parameters).map(drop)
    }

    /// Makes a bdev that enciphers by AES-256-XTS.
    pub(crate) fn crypto(&self, name: &str, base: &str) -> Result<(), Failure> {
        let (key, tweak) = ("5a".repeat(32), "a5".repeat(32));
        let key = json!({ "name": name, "cipher": "AES_XTS", "key": key, "key2": tweak });
        self.call("accel_crypto_key_create", &key)?;
        self.call("bdev_crypto_create", &json!({ "name": name, "base_bdev_name": base, "key_name": name })).map(drop)
    }

    /// Makes a thin volume in a store of its own over a bdev, which is somewhat larger. Its bdev has a [name](Self::thin_name) of its own.
    pub(crate) fn thin(&self, name: &str, base: &str, bytes: u64) -> Result<(), Failure> {
        let store = format!("{name}-store");
        self.call("bdev_lvol_create_lvstore", &json!({ "bdev_name": base, "lvs_name": store }))?;
        let volume = json!({ "lvs_name": store, "lvol_name": name, "size_in_mib": bytes >> 20, "thin_provision": true });
        self.call("bdev_lvol_create", &volume).map(drop)
    }

    /// The name of a thin volume's bdev.
    pub(crate) fn thin_name(name: &str) -> String {
        format!("{name}-store/{name}")
    }

    /// Caps a bdev at so many operations a second.
    pub(crate) fn limit(&self, name: &str, iops: u64) -> Result<(), Failure> {
        self.call("bdev_set_qos_limit", &json!({ "name": name, "rw_ios_per_sec": iops })).map(drop)
    }

    /// Makes a virtio disk of a bdev; its socket has its name.
    pub(crate) fn virtio(&self, name: &str, bdev: &str) -> Result<(), Failure> {
        self.call("vhost_create_blk_controller", &json!({ "ctrlr": name, "dev_name": bdev })).map(drop)
    }

    /// Makes a controller with a bdev; its socket is in a folder of the device's name.
    pub(crate) fn device(&self, name: &str, bdev: &str) -> Result<(), Failure> {
        let folder = self.folder(name);
        fs::create_dir_all(&folder).map_err(|source| Failure::Write { path: folder.clone(), source })?;
        let nqn = format!("nqn.2019-07.io.spdk:{name}");
        let subsystem = json!({ "nqn": nqn, "allow_any_host": true, "serial_number": name });
        self.call("nvmf_create_subsystem", &subsystem)?;
        self.call("nvmf_subsystem_add_ns", &json!({ "nqn": nqn, "namespace": { "bdev_name": bdev } }))?;
        let address = json!({ "trtype": "VFIOUSER", "traddr": folder, "trsvcid": "0" });
        self.call("nvmf_subsystem_add_listener", &json!({ "nqn": nqn, "listen_address": address })).map(drop)
    }
}

impl Subject for Spdk {
    fn name(&self) -> &'static str {
        "spdk"
    }

    fn folder(&self, device: &str) -> PathBuf {
        self.folder.join(device)
    }

    fn daemon(&mut self) -> &mut Daemon {
        &mut self.daemon
    }

    fn work(&self) -> Result<Work, Failure> {
        let reactors = self.call("framework_get_reactors", &Value::Null)?;
        let reactors = reactors["reactors"].as_array().into_iter().flatten();
        let busy_cycles = reactors.filter_map(|reactor| reactor["busy"].as_f64()).sum();
        let bdevs = self.call("bdev_get_iostat", &json!({}))?;
        let bdevs = bdevs["bdevs"].as_array().into_iter().flatten();
        let operations = |bdev: &Value, name: &str| bdev[name].as_f64().unwrap_or(0.0);
        let commands = bdevs.map(|bdev| operations(bdev, "num_read_ops") + operations(bdev, "num_write_ops")).sum();
        Ok(Work { busy_cycles, commands })
    }
}

/// One request on the target's own socket (JSON-RPC 2.0), and its result.
fn call(socket: &Path, method: &str, parameters: &Value) -> Result<Value, Failure> {
    let failed = |source| Failure::Ask { peer: socket.display().to_string(), source };
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).map_err(failed)?;
    let mut request = json!({ "jsonrpc": "2.0", "id": 1, "method": method });
    if !parameters.is_null() {
        request["params"] = parameters.clone();
    }
    stream.write_all(request.to_string().as_bytes()).map_err(failed)?;
    let mut answers = serde_json::Deserializer::from_reader(&stream).into_iter::<Value>();
    let answer = answers.next().and_then(Result::ok).unwrap_or(Value::Null);
    match answer.get("result") {
        Some(result) => Ok(result.clone()),
        None => Err(Failure::Rpc { method: method.to_owned(), error: answer["error"].to_string() }),
    }
}
