use millrace_block::BlockSize;
use proptest::prelude::*;

use super::*;

#[test]
fn expressions_read_as_they_are_written() {
    let text = "stripe(chunk=4K, file:/a.img, concat(memory(size=1G), volume:b))";
    let node: Node = text.parse().unwrap();
    assert_eq!(node.to_string(), text);
    assert_eq!((node.depth(), node.leaves().len()), (3, 3));
    // A bar and brackets mean the same; the shorter form is shown.
    let [bar, brackets]: [Node; 2] = ["stripe | null", " stripe ( null ) "].map(|text| text.parse().unwrap());
    assert_eq!((bar.to_string().as_str(), &bar), ("stripe | null", &brackets));
    let last: Node = "stripe(chunk=8K, file:/a) | concat(null, memory)".parse().unwrap();
    assert_eq!(last.to_string(), "stripe(chunk=8K, file:/a, concat(null, memory))");
    let quoted: Node = r#"file:"/with spaces, (and) more|\"\\.img""#.parse().unwrap();
    assert_eq!(quoted.as_leaf().unwrap().spec, r#"file:/with spaces, (and) more|"\.img"#);
    assert_eq!(quoted.to_string().parse::<Node>().unwrap(), quoted);
    let equals: Node = "file:/a=b".parse().unwrap();
    assert_eq!(equals.as_leaf().unwrap().file().unwrap().to_str(), Some("/a=b"));
}

#[test]
fn errors_point_at_the_column() {
    let cases = [
        ("", 1, "a service or back end is expected, not the end"),
        ("strip(null)", 1, "strip: there is no such service; there are "),
        ("stripe(null", 12, "\",\" or \")\" is expected, not the end"),
        ("stripe(null) null", 14, "\"|\" or the end is expected, not \"null\""),
        (
            "crypt(key=command:/bin/cat /k, null)",
            28,
            "\",\" or \")\" is expected, not \"/k\"; what has spaces stands in quotes",
        ),
        ("stripe(chunk=4K, chunk=8K, null)", 18, "chunk is set already"),
        ("stripe(null, chunks=4K)", 14, "stripe: chunks: there is no such setting; there are chunk"),
        ("stripe(chunk=7, null)", 8, "stripe: chunk: a power of two"),
        ("concat(null, stripe(chunk=7, null))", 21, "concat.1 (stripe): chunk: a power of two"),
        ("concat(memory(size=x), null)", 15, "concat.0 (memory): size: \"x\" is not a size"),
        ("concat(null(sized=1), null)", 13, "concat.0 (null): sized: a leaf has the setting size only"),
        ("file:/a | null", 1, "file:/a is a back end: nothing can be below it"),
        ("stripe(file:\"/a)", 8, "the quotes do not end"),
        ("stripe | chunk=4K", 10, "a service or back end is expected, not \"chunk=4K\""),
        ("stripe()", 1, "stripe: it is over 0 legs; 1 to 64 are possible"),
        ("FILE:/a", 1, "FILE:/a: leaf: write memory, null, file:PATH, nvme:ADDRESS or volume:NAME"),
        ("a\\b", 2, "'\\\\' cannot stand here; put it in quotes"),
        ("concat(null, strip(null))", 14, "concat.1 (strip): there is no such service; there are "),
        ("/srv/a.img", 1, "/srv/a.img: there is no such service; a file or block device is written file:/srv/a.img"),
        ("throttle(IOPS=3) | memory", 10, "throttle: IOPS: settings are in small letters: iops=3"),
        ("throttle(iops) | memory", 10, "throttle: iops: this setting needs a value: iops=…"),
        ("throttle(iops=3, Speed=3) | memory", 18, "throttle: Speed: there is no such setting; there are iops, "),
        ("throttle(io) | memory", 10, "throttle.0 (io): there is no such service; there are "),
        ("crypt(KEY=file:/k, null)", 7, "crypt: KEY: settings are in small letters: key=file:/k"),
        ("concat(memory(SIZE=1G), null)", 15, "memory: SIZE: settings are in small letters: size=1G"),
    ];
    for (text, column, message) in cases {
        let error = text.parse::<Node>().unwrap_err();
        assert_eq!(error.column, column, "{text}: {error}");
        assert!(error.message.starts_with(message), "{text}: {error}");
    }
    let unknown = "Memory".parse::<Node>().unwrap_err().message;
    assert!(unknown.ends_with("; or a back end: memory, null, file:PATH, nvme:ADDRESS, volume:NAME"), "{unknown}");
    let deep = "stripe|".repeat(100) + "null";
    assert!(deep.parse::<Node>().unwrap_err().message.contains("at most"));
    let wide = format!("concat({})", vec!["concat(null,null,null,null,null,null)"; 60].join(","));
    assert!(wide.parse::<Node>().unwrap_err().message.contains("256 nodes"));
}

#[test]
fn documents_are_text_or_tables() {
    #[derive(serde::Deserialize)]
    struct Document {
        stack: Node,
    }
    let expected: Node = "stripe(chunk=64K, file:/a, concat(memory(size=1G), null))".parse().unwrap();
    let documents = [
        r#"stack = "stripe(chunk=64K, file:/a, concat(memory(size=1G), null))""#,
        r#"stack = { service = "stripe", chunk = "64K", over = ["file:/a", "concat(memory(size=1G), null)"] }"#,
        r#"
        [stack]
        service = "stripe"
        chunk = "64K"
        [[stack.over]]
        leaf = "file:/a"
        [[stack.over]]
        service = "concat"
        over = [{ leaf = "memory", size = "1G" }, "null"]
        "#,
    ];
    for document in documents {
        let found: Document = toml::from_str(document).unwrap();
        assert_eq!(found.stack, expected, "{document}");
    }
    let json: Node = serde_json::from_str(r#"{"service":"stripe","chunk":4096,"over":"null"}"#).unwrap();
    assert_eq!(json.to_string(), "stripe(chunk=4096) | null");
    assert_eq!(serde_json::to_string(&json).unwrap(), r#""stripe(chunk=4096) | null""#);
    for (wrong, why) in [
        (r#"{"service":"stripes","over":"null"}"#, "stripes: there is no such service"),
        (r#"{"over":"null"}"#, "a node has \"service\" and \"over\", or \"leaf\""),
        (r#"{"leaf":"memory","over":"null"}"#, "a node has"),
        (r#"{"service":"stripe","over":[1]}"#, "a stack: an expression, or a table"),
        (r#""stripe(""#, "stack, column 8"),
    ] {
        let error = serde_json::from_str::<Node>(wrong).unwrap_err().to_string();
        assert!(error.contains(why), "{wrong}: {error}");
    }
}

#[test]
fn relative_paths_start_where_they_are_told() {
    let node: Node = "stripe(file:a.img, file:/b.img, memory)".parse().unwrap();
    let resolved = node.resolved(Path::new("/srv/x"));
    assert_eq!(resolved.to_string(), "stripe(file:/srv/x/a.img, file:/b.img, memory)");
}

#[test]
fn leaves_have_the_size_that_they_are_told() {
    let sizes = |stack: &str, size: Option<u64>| {
        let stack: Node = stack.parse().unwrap();
        let leaves = stack.sized_leaves(size, BlockSize::B512).into_iter();
        leaves.map(|(leaf, size)| (leaf.spec.clone(), size)).collect::<Vec<_>>()
    };
    let (mib, leaf) = (1 << 20, |name: &str, size: Option<u64>| (format!("file:/{name}"), size));
    assert_eq!(sizes("file:/a", Some(mib)), [leaf("a", Some(mib))]);
    assert_eq!(sizes("file:/a(size=2M)", None), [leaf("a", Some(2 * mib))]);
    assert_eq!(sizes("throttle(iops=1) | file:/a", Some(mib)), [leaf("a", Some(mib))]);
    assert_eq!(sizes("concat(file:/a(size=1M), file:/b)", Some(3 * mib)), [leaf("a", Some(mib)), leaf("b", Some(2 * mib))]);
    assert_eq!(sizes("cache(mode=through, file:/a) | file:/b", Some(mib)), [leaf("a", None), leaf("b", Some(mib))]);
    assert_eq!(sizes("throttle(iops=1) | file:/a", None), [leaf("a", None)]);
}

#[test]
fn leaves_in_memory_are_told_their_size() {
    let checked = |stack: &str, size: Option<u64>| {
        let stack: Node = stack.parse().unwrap();
        stack.check_sizes(size, BlockSize::B512).map_err(|error| error.to_string())
    };
    let (mib, own) = (1 << 20, "it needs a size: memory(size=…)");
    for (stack, size) in [
        ("concat(memory(size=40M), memory)", Some(50 * mib)),
        ("concat(memory(size=40M), memory(size=1M))", Some(10 * mib)),
        ("cache(mode=through, memory(size=1M)) | memory", Some(mib)),
        ("throttle(iops=1) | stripe(memory, null)", Some(mib)),
        ("stripe(memory(size=1M), memory(size=1M))", None),
        ("cache(mode=through, file:/a) | file:/b", Some(mib)),
        ("memory", None),
    ] {
        assert_eq!(checked(stack, size), Ok(()), "{stack}");
    }
    let more = "; the legs before it have 40M together, and the volume 10M";
    for (stack, size, why) in [
        ("concat(memory(size=40M), memory)", Some(10 * mib), format!("concat.1 (memory): {own}{more}")),
        ("cache(mode=through, memory) | file:/a", Some(mib), format!("cache.0 (memory): {own}")),
        ("throttle(iops=1) | stripe(file:/a, memory)", None, format!("throttle.0.1 (memory): {own}")),
    ] {
        assert_eq!(checked(stack, size), Err(why), "{stack}");
    }
}

fn leaf() -> impl Strategy<Value = Node> {
    let spec = prop_oneof![
        Just("memory".to_owned()),
        Just("null".to_owned()),
        "[ -~äß]{0,20}".prop_map(|path| format!("file:{path}")),
        "[a-z.-]{1,8}".prop_map(|name| format!("volume:{name}")),
    ];
    (spec, proptest::option::of(1_u64..1 << 40)).prop_map(|(spec, size)| {
        let mut leaf = Leaf::new(spec);
        if let Some(size) = size {
            leaf.settings.add("size", &size.to_string());
        }
        Node::Leaf(leaf)
    })
}

fn node() -> impl Strategy<Value = Node> {
    leaf().prop_recursive(6, 40, 5, |inner| {
        let legs = proptest::collection::vec(inner, 1..5);
        (legs, 12_u32..27, any::<bool>()).prop_map(|(legs, chunk, stripe)| {
            let mut settings = Settings::default();
            if stripe {
                settings.add("chunk", &(1_u64 << chunk).to_string());
            }
            let service = if stripe { "stripe" } else { "concat" }.to_owned();
            Node::Service(ServiceNode { service, settings, legs })
        })
    })
}

proptest! {
    #[test]
    fn what_is_shown_reads_back(node in node()) {
        let text = node.to_string();
        prop_assert_eq!(&text.parse::<Node>().map_err(|error| format!("{text}: {error}")), &Ok(node.clone()));
        let json = serde_json::to_string(&node).unwrap();
        prop_assert_eq!(serde_json::from_str::<Node>(&json).unwrap(), node);
    }

    #[test]
    fn any_text_is_a_stack_or_an_error_within_it(text in "[a-z(),|=:\"\\\\ ]{0,60}") {
        match text.parse::<Node>() {
            Ok(node) => prop_assert_eq!(node.to_string().parse::<Node>().unwrap(), node),
            Err(error) => prop_assert!(error.column >= 1 && error.column <= text.chars().count() + 1),
        }
    }
}

#[test]
fn files_of_settings_are_found_wherever_they_are() {
    let node: Node = "concat(crypt(key=file:/k) | mirror(file:/a, crypt(key=file:/l) | file:/b), volume:x)".parse().unwrap();
    let files: Vec<_> = node.setting_files().into_iter().map(|path| path.to_str().unwrap()).collect();
    assert_eq!(files, ["/k", "/l"]);
}
