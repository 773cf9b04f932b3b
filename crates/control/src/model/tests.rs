use super::*;

fn volume(text: &str) -> Result<VolumeSpec, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn device(nvme: &str) -> Result<DeviceSpec, String> {
    serde_json::from_str(&format!(r#"{{"name":"d","nvme":{nvme}}}"#)).map_err(|error| error.to_string())
}

fn why(spec: &DeviceSpec) -> String {
    spec.validate(1).unwrap_err().to_string()
}

#[test]
fn what_is_left_out_is_usual() {
    let spec = volume(r#"{"name":"a","size":"1G","backend":"memory"}"#).unwrap();
    assert_eq!((spec.size, spec.block_size.0, spec.read_only), (Some(Size(1 << 30)), BlockSize::B512, false));
    let spec = device("{}").unwrap();
    let nvme = spec.kind.nvme().unwrap();
    assert_eq!((nvme.queues, nvme.vectors(), nvme.namespaces), (16, 17, 256));
    assert_eq!(nvme.mdts, Size(1 << 20));
    spec.validate(1).unwrap();
}

#[test]
fn a_device_is_one_thing() {
    let parse = |text: &str| serde_json::from_str::<DeviceSpec>(text).map_err(|error| error.to_string());
    let disk = parse(r#"{"name":"d","virtio_blk":{"serial":"S"}}"#).unwrap();
    assert_eq!(disk.kind.virtio_blk().map(|disk| disk.queues), Some(16));
    assert_eq!(serde_json::to_string(&disk).unwrap(), r#"{"name":"d","virtio_blk":{"queues":16,"serial":"S"}}"#);
    assert!(!disk.disk_config().pin_memory, "a guest may give its memory back, unless somebody knows better");
    assert!(parse(r#"{"name":"d","virtio_blk":{"pin_memory":true}}"#).unwrap().disk_config().pin_memory);
    disk.validate(1).unwrap();
    for text in [r#"{"name":"d"}"#, r#"{"name":"d","nvme":{},"virtio_blk":{}}"#] {
        assert!(parse(text).unwrap_err().contains("either nvme or virtio_blk"), "{text}");
    }
    for (text, part) in [
        (r#"{"name":"d","virtio_blk":{"queues":0}}"#, "0 queues: 1 to 256"),
        (r#"{"name":"d","virtio_blk":{"serial":"123456789012345678901"}}"#, "serial: 1 to 20"),
    ] {
        assert!(why(&parse(text).unwrap()).contains(part), "{text}");
    }
}

#[test]
fn unknown_keys_and_values_are_refused() {
    for (text, part) in [
        (r#"{"name":"a","size":1,"backend":"memory","siez":2}"#, "unknown field `siez`"),
        (r#"{"name":"a","size":1}"#, "missing field `stack` (or `backend`)"),
        (r#"{"name":"a","size":1,"backend":"floppy"}"#, "\"floppy\" is unknown"),
        (r#"{"name":"a","size":1,"backend":"file:"}"#, "lacks a path"),
        (r#"{"name":"a","size":1,"backend":"memory","block_size":520}"#, "520 is not usable"),
        (r#"{"name":"../a","size":1,"backend":"memory"}"#, "cannot be a name"),
        (r#"{"name":"a","size":"1Q","backend":"memory"}"#, "not a size"),
    ] {
        let error = volume(text).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    assert!(device(r#"{"queue":1}"#).unwrap_err().contains("unknown field `queue`"));
    assert!(device(r#"{"doorbells":"bell"}"#).unwrap_err().contains("unknown variant `bell`"));
    assert!(device(r#"{"queues":65536}"#).is_err());
}

#[test]
fn volumes_need_what_their_back_end_needs() {
    for (text, part) in [
        (r#"{"name":"a","backend":"memory"}"#, "needs a size"),
        (r#"{"name":"a","backend":"null"}"#, "needs a size"),
        (r#"{"name":"a","size":512,"backend":"memory","read_only":true}"#, "only a file"),
        (r#"{"name":"a","size":512,"backend":"file:a.img"}"#, "must be absolute"),
    ] {
        let error = volume(text).unwrap().validate().unwrap_err().to_string();
        assert!(error.starts_with("volume a: ") && error.contains(part), "{error}");
    }
    volume(r#"{"name":"a","backend":"file:/a.img","read_only":true}"#).unwrap().validate().unwrap();
    let shared = |size: &str| {
        let stack = "concat(memory(size=40M), memory)";
        volume(&format!(r#"{{"name":"a","size":"{size}","stack":"{stack}"}}"#)).unwrap().check_sizes()
    };
    shared("41M").unwrap();
    let told = "volume a: concat.1 (memory): it needs a size: memory(size=…); the legs before it have 40M together, and the volume 10M";
    assert_eq!(shared("10M").unwrap_err().to_string(), told);
}

#[test]
fn controllers_have_limits() {
    for (nvme, part) in [
        (r#"{"queues":0}"#, "0 queues"),
        (r#"{"queues":257}"#, "257 queues"),
        (r#"{"vectors":0}"#, "0 vectors"),
        (r#"{"vectors":258}"#, "258 vectors"),
        (r#"{"queue_entries":1}"#, "1 queue entries"),
        (r#"{"queue_entries":65537}"#, "65537 queue entries"),
        (r#"{"namespaces":0}"#, "0 namespaces"),
        (r#"{"namespaces":1025}"#, "1025 namespaces"),
        (r#"{"mdts":"3K"}"#, "mdts of 3K"),
        (r#"{"mdts":"2K"}"#, "mdts of 2K"),
        (r#"{"mdts":"4K"}"#, "mdts of 4K"),
        (r#"{"mdts":"4M"}"#, "mdts of 4M"),
        (r#"{"serial":""}"#, "serial"),
        (r#"{"serial":" a"}"#, "serial"),
        (r#"{"serial":"ä"}"#, "serial"),
        (r#"{"serial":"123456789012345678901"}"#, "serial"),
        (r#"{"ns_backend":"null"}"#, "ns_backend"),
        (r#"{"ns_backend":"file:x"}"#, "must be absolute"),
        (r#"{"ns_backend":"file:/nowhere/at/all"}"#, "no directory /nowhere/at/all"),
    ] {
        let error = why(&device(nvme).unwrap());
        assert!(error.starts_with("device d: ") && error.contains(part), "{nvme}: {error}");
    }
    let largest = r#"{"queues":256,"queue_entries":65536,"namespaces":1024,"mdts":"2M","serial":"12345678901234567890"}"#;
    let spec = device(largest).unwrap();
    spec.validate(1).unwrap();
    assert_eq!(spec.kind.nvme().unwrap().vectors(), 257);
}

#[test]
fn a_device_has_a_place() {
    let mut spec = device("{}").unwrap();
    spec.shard = Some(1);
    assert!(why(&spec).contains("no shard 1"));
    spec.validate(2).unwrap();
    spec.socket = Some("relative.sock".into());
    assert!(spec.validate(2).unwrap_err().to_string().contains("must be absolute"));
    let api = DeviceSpec { name: "api".parse().unwrap(), ..device("{}").unwrap() };
    assert!(why(&api).contains("the API's own"));
}

#[test]
fn the_controller_gets_what_was_declared() {
    let spec = device(r#"{"queues":2,"mdts":"64K","doorbells":"messages","ns_quota":"1M","serial":"S"}"#).unwrap();
    let config = spec.controller_config(7, uuid::Uuid::from_u128(1));
    assert_eq!((config.queues, config.vectors, config.max_transfer(), config.cntlid), (2, 3, 64 << 10, 7));
    assert_eq!((config.doorbells, config.quota.bytes, config.serial.as_str()), (DoorbellMode::Messages, 1 << 20, "S"));
    assert_eq!(config.subnqn, "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001");
}

#[test]
fn relative_paths_start_somewhere() {
    let backend = |text: &str| Backend(text.parse().unwrap());
    let base = std::path::Path::new("/srv");
    assert_eq!(String::from(backend("file:./a.img").resolved(base)), "file:/srv/a.img");
    assert_eq!(String::from(backend("file:/b/a.img").resolved(base)), "file:/b/a.img");
    assert_eq!(String::from(backend("memory").resolved(base)), "memory");
}
