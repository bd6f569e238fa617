// Evaluate Java in one JShell that lives as long as the guest.
//
// The agent starts this file with the number of a connected socket, and speaks
// protocol/runtime/CONTRACT.md over it. The JVM compiles and runs each cell in its own process
// (package jdk.jshell), so a fork of the machine has a compiler that is warm.
//
// SIGINT stops the thread of the cell by Thread.stop. Java 20 has removed that method: there, only
// code that waits can be interrupted, and the agent ends the process for code that does not.

import java.io.BufferedOutputStream;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.lang.reflect.Array;
import java.lang.reflect.Field;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Random;
import java.util.SplittableRandom;
import java.util.concurrent.Semaphore;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;
import jdk.jshell.UnresolvedReferenceException;
import jdk.jshell.execution.DirectExecutionControl;
import jdk.jshell.spi.ExecutionControl;
import jdk.jshell.spi.ExecutionControlProvider;
import jdk.jshell.spi.ExecutionEnv;
import sun.misc.Signal;

final class WarmRuntime {
    static final int CONTRACT = 1;
    static final int REPR_MAX = 65_536; // characters
    static final int TEXT_MAX = 65_536; // characters of a message or a traceback
    static final int TYPE_MAX = 1_000; // characters of the name of a class
    static final int REHEARSALS = 16;
    static final long LATE_MS = 1_000; // that a signal may take after its announcement
    /** The JVM heeds signals in the order of their numbers: this one after SIGINT. */
    static final Signal MARK = new Signal("WINCH");

    /** What JShell's own tool imports, too. */
    static final String[] IMPORTS = {
        "java.io.*", "java.math.*", "java.net.*", "java.nio.file.*", "java.util.*",
        "java.util.concurrent.*", "java.util.function.*", "java.util.regex.*", "java.util.stream.*",
    };

    final Channel channel;
    final Cells cells = new Cells();
    /** Signals since the last evaluation began. */
    final Semaphore signals = new Semaphore(0);
    /** Signals of `MARK`, by which `settle` knows that those before it were heeded. */
    final Semaphore marks = new Semaphore(0);
    /** An evaluation was interrupted, or was to be: another signal may be on its way. */
    boolean unsettled;

    WarmRuntime(int socket) throws ReflectiveOperationException {
        channel = new Channel(socket);
        Signal.handle(new Signal("INT"), signal -> {
            cells.interrupt();
            signals.release();
        });
        Signal.handle(MARK, signal -> marks.release());
    }

    public static void main(String[] args) throws Exception {
        System.setOut(flushed(FileDescriptor.out));
        System.setErr(flushed(FileDescriptor.err));
        new WarmRuntime(Integer.parseInt(args[args.length - 1])).serve();
    }

    static PrintStream flushed(FileDescriptor file) {
        var out = new BufferedOutputStream(new FileOutputStream(file), 8192);
        return new PrintStream(out, true, StandardCharsets.UTF_8);
    }

    void serve() throws Exception {
        cells.prepare(IMPORTS);
        String path = System.getenv("CLASSPATH");
        if (path != null) cells.shell.addToClasspath(path);
        while (true) {
            Frame frame = channel.receive();
            switch (frame.kind) {
                case Frame.DATA -> channel.send(Frame.REPLY, reply(evaluate(frame.text())));
                case Frame.REQUEST -> request(Json.parse(frame.text()));
                case Frame.CONTROL -> takeLateSignal();
                default -> throw new IOException("a frame of kind " + frame.kind);
            }
        }
    }

    /** What was announced too late is for nobody: its signal must not end the next cell. */
    void takeLateSignal() throws InterruptedException {
        signals.tryAcquire(LATE_MS, TimeUnit.MILLISECONDS);
        unsettled = true;
    }

    /**
     * Wait until each SIGINT that has come was heeded, by a thread that the JVM makes for it. The
     * agent sends one a second, so one may come just when a cell ends, and must not end the next.
     */
    void settle() throws IOException, InterruptedException {
        unsettled = false;
        marks.drainPermits();
        for (int count = 0; count < LATE_MS && isSignalPending(); count++) Thread.sleep(1);
        Signal.raise(MARK);
        marks.tryAcquire(LATE_MS, TimeUnit.MILLISECONDS);
        for (Thread each : Thread.getAllStackTraces().keySet()) {
            if (each.getName().equals("SIGINT handler")) each.join(LATE_MS);
        }
    }

    /** Whether the kernel has a SIGINT for this process that no thread has taken yet. */
    static boolean isSignalPending() throws IOException {
        for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith("ShdPnd:")) {
                return (Long.parseUnsignedLong(line.substring(7).strip(), 16) & 2) != 0;
            }
        }
        return false;
    }

    void request(Map<?, ?> request) throws IOException, InterruptedException {
        String op = String.valueOf(request.get("op"));
        switch (op) {
            case "hello" -> answer(Map.of(
                "contract", CONTRACT, "language", "Java " + System.getProperty("java.version")));
            case "warm" -> {
                if (succeeded(request.get("code"), "warm_up_failed")) answer(Map.of());
            }
            case "freeze" -> {
                for (int count = 0; count < REHEARSALS; count++) reseed("00".repeat(64));
                System.gc();
                answer(Map.of());
            }
            case "post_fork" -> postFork(request);
            default -> refuse("protocol", "this runtime does not know " + op);
        }
    }

    void postFork(Map<?, ?> request) throws IOException, InterruptedException {
        List<String> reseeded;
        try {
            reseeded = reseed((String) request.get("seed"));
        } catch (RuntimeException error) {
            refuse("reseed_failed", error.toString());
            return;
        }
        Object code = request.get("code");
        if (!succeeded(code, "hook_failed")) return;
        answer(Map.of("reseeded", reseeded, "hook", code == null ? "none" : "ran"));
    }

    /** Evaluate code that may be null; refuse the request if it fails. */
    boolean succeeded(Object code, String refusal) throws IOException, InterruptedException {
        if (code == null) return true;
        Outcome outcome = evaluate((String) code);
        if (outcome.error != null) refuse(refusal, outcome.error.traceback);
        return outcome.error == null;
    }

    Outcome evaluate(String code) throws IOException, InterruptedException {
        if (unsettled) settle();
        signals.drainPermits();
        Outcome outcome = cells.run(code);
        System.out.flush();
        System.err.flush();
        unsettled |= signals.availablePermits() > 0;
        outcome.timedOut = outcome.interrupted && channel.wasAnnounced();
        return outcome;
    }

    static Map<String, Object> reply(Outcome outcome) {
        Map<String, Object> reply = new LinkedHashMap<>();
        reply.put("has_value", outcome.repr != null);
        if (outcome.repr != null) {
            reply.put("repr", cut(outcome.repr, REPR_MAX));
            reply.put("value_is_json", outcome.json != null);
            reply.put("value", outcome.json == null ? null : new Json.Raw(outcome.json));
        }
        Fault error = outcome.error;
        if (error == null) {
            reply.put("error", null);
        } else {
            Map<String, Object> said = new LinkedHashMap<>();
            said.put("type", cut(error.type, TYPE_MAX));
            said.put("message", cut(error.message, TEXT_MAX));
            said.put("traceback", cut(error.traceback, TEXT_MAX));
            reply.put("error", said);
        }
        reply.put("timed_out", outcome.timedOut);
        return reply;
    }

    void answer(Map<String, ?> body) throws IOException {
        channel.send(Frame.REPLY, body);
    }

    void refuse(String code, String message) throws IOException {
        channel.send(Frame.ERROR, Map.of("code", code, "message", cut(message, TEXT_MAX)));
    }

    /** The beginning of a text, without half a character at its end. */
    static String cut(String text, int length) {
        if (text.length() <= length) return text;
        boolean half = Character.isHighSurrogate(text.charAt(length - 1));
        return text.substring(0, half ? length - 1 : length);
    }

    /** Reseed each generator of the JVM that a fork has inherited; return their names. */
    static List<String> reseed(String seed) {
        var fresh = new SplittableRandom(0);
        for (int at = 0; at < seed.length(); at += 16) {
            long word = Long.parseUnsignedLong(seed.substring(at, at + 16), 16);
            fresh = new SplittableRandom(fresh.nextLong() ^ word);
        }
        try {
            var holder = Class.forName("java.lang.Math$RandomNumberGeneratorHolder");
            ((Random) field(holder, "randomNumberGenerator").get(null)).setSeed(fresh.nextLong());
            field(Collections.class, "r").set(null, new Random(fresh.nextLong()));
            // Of these the JVM makes the seeds of all generators to come.
            for (var each : Map.of(Random.class, "seedUniquifier", SplittableRandom.class,
                    "defaultGen", ThreadLocalRandom.class, "seeder").entrySet()) {
                Field seeds = field(each.getKey(), each.getValue());
                ((AtomicLong) seeds.get(null)).set(fresh.nextLong());
            }
            Field own = field(Thread.class, "threadLocalRandomSeed");
            for (Thread thread : Thread.getAllStackTraces().keySet()) {
                own.setLong(thread, fresh.nextLong());
            }
            // SecureRandom, and so UUID, keeps what it has read of /dev/urandom for a moment.
            for (String variant : List.of("", "$Blocking", "$NonBlocking")) {
                var source = Class.forName("sun.security.provider.NativePRNG" + variant);
                Object io = field(source, "INSTANCE").get(null);
                if (io != null) field(io.getClass(), "buffered").setInt(io, 0);
            }
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("this Java keeps its generators elsewhere", error);
        }
        return List.of("java.math", "java.util.random", "java.security");
    }

    static Field field(Class<?> owner, String name) throws NoSuchFieldException {
        Field field = owner.getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }
}

/** One message of the agent's. */
final class Frame {
    static final int REQUEST = 1, REPLY = 2, ERROR = 3, CONTROL = 5, DATA = 32;

    final int kind;
    final byte[] payload;

    Frame(int kind, byte[] payload) {
        this.kind = kind;
        this.payload = payload;
    }

    String text() {
        return new String(payload, StandardCharsets.UTF_8);
    }
}

/** Frames over the agent's socket. */
final class Channel {
    static final int HEADER_BYTES = 8;

    private final FileInputStream in;
    private final FileOutputStream out;
    private final Deque<Frame> held = new ArrayDeque<>();

    Channel(int socket) throws ReflectiveOperationException {
        // Java has no way to open a descriptor by its number. Children do not get it: Java closes
        // all but the first three in them.
        FileDescriptor descriptor = new FileDescriptor();
        WarmRuntime.field(FileDescriptor.class, "fd").setInt(descriptor, socket);
        in = new FileInputStream(descriptor);
        out = new FileOutputStream(descriptor);
    }

    Frame receive() throws IOException {
        return held.isEmpty() ? read() : held.remove();
    }

    /** Whether the agent announced the signal that has come: it does so before it sends one. */
    boolean wasAnnounced() throws IOException {
        while (in.available() > 0) {
            Frame frame = read();
            if (frame.kind == Frame.CONTROL) return true;
            held.add(frame);
        }
        return false;
    }

    private Frame read() throws IOException {
        ByteBuffer header = ByteBuffer.wrap(take(HEADER_BYTES)).order(ByteOrder.LITTLE_ENDIAN);
        return new Frame(header.get(4), take(header.getInt(0)));
    }

    private byte[] take(int size) throws IOException {
        byte[] data = new byte[size];
        for (int at = 0; at < size; ) {
            int count = in.read(data, at, size - at);
            // Without an agent there is nobody to run anything for.
            if (count < 0) Runtime.getRuntime().halt(0);
            at += count;
        }
        return data;
    }

    void send(int kind, Map<String, ?> body) throws IOException {
        byte[] payload = Json.text(body).getBytes(StandardCharsets.UTF_8);
        ByteBuffer frame = ByteBuffer.allocate(HEADER_BYTES + payload.length);
        frame.order(ByteOrder.LITTLE_ENDIAN).putInt(payload.length).put((byte) kind);
        frame.position(HEADER_BYTES).put(payload);
        out.write(frame.array());
    }
}

/** What ended a cell. */
final class Fault {
    final String type;
    final String message;
    final String traceback;

    Fault(String type, String message, String traceback) {
        this.type = type;
        this.message = message;
        this.traceback = traceback;
    }

    static Fault interruption() {
        return new Fault("Interrupted", "the code was interrupted", "Interrupted");
    }
}

/** What came of a cell. */
final class Outcome {
    /** The value as text; null if there is none. */
    String repr;
    /** The value as JSON; null if JSON cannot say it. */
    String json;
    Fault error;
    boolean interrupted;
    boolean timedOut;
}

/** Runs snippets in this process, each in a thread of its own. */
final class Control extends DirectExecutionControl {
    private Thread thread;
    private boolean busy;
    private boolean interrupted;
    /** Of the last snippet. */
    String json;
    /** A snippet has ended, or not begun, because of an interruption. */
    volatile boolean stopped;

    synchronized void begin() {
        busy = true;
        interrupted = stopped = false;
    }

    /** Return whether the cell was interrupted. */
    synchronized boolean end() {
        busy = false;
        return interrupted;
    }

    synchronized boolean isInterrupted() {
        return interrupted;
    }

    /** Have the cell end that runs, if there is one. */
    @SuppressWarnings({"deprecation", "removal"})
    synchronized void interrupt() {
        if (!busy) return;
        interrupted = true;
        if (thread == null) return;
        try {
            thread.stop();
        } catch (UnsupportedOperationException error) {
            thread.interrupt();
        }
    }

    @Override
    protected String invoke(Method method) throws Exception {
        String[] text = {null, null};
        Throwable[] thrown = {null};
        Thread made = new Thread(() -> {
            try {
                Object value = method.invoke(null);
                text[1] = Json.exact(value);
                text[0] = valueString(value);
            } catch (Throwable error) {
                thrown[0] = error;
            }
        }, "cell");
        synchronized (this) {
            stopped = interrupted;
            if (interrupted) throw new StoppedException();
            thread = made;
            made.start();
        }
        try {
            made.join();
        } finally {
            synchronized (this) {
                thread = null;
            }
        }
        json = text[1];
        if (text[0] != null) return text[0];
        stopped = isInterrupted();
        if (stopped) throw new StoppedException();
        // Of an exception in `toString`, too, what matters is where the user's code threw it.
        if (thrown[0] instanceof InvocationTargetException error) throw error;
        throw new InvocationTargetException(thrown[0]);
    }
}

/** Cells of one JShell. */
final class Cells {
    private static final Pattern WRAPPER = Pattern.compile("(REPL\\.)?\\$JShell\\$\\d+[A-Z]*[.$]");
    private static final int TRACE_MAX = 50; // frames of each exception
    private static final int CAUSES_MAX = 20;

    private final Control control = new Control();
    final JShell shell = JShell.builder().executionEngine(new ExecutionControlProvider() {
        @Override
        public String name() {
            return "forkd";
        }

        @Override
        public ExecutionControl generate(ExecutionEnv env, Map<String, String> parameters) {
            return control;
        }
    }, Map.of()).build();
    private final Map<String, int[]> places = new HashMap<>(); // of snippets: cell and line
    private int count;

    /** Import packages, before the first cell. */
    void prepare(String... packages) {
        for (String each : packages) shell.eval("import " + each + ";");
    }

    void interrupt() {
        control.interrupt();
    }

    Outcome run(String code) {
        count++;
        control.begin();
        Outcome outcome = new Outcome();
        boolean unfinished = false;
        try {
            unfinished = runEach(code, outcome);
        } catch (RuntimeException | StackOverflowError | OutOfMemoryError error) {
            // The compiler's own: code that is nested too deeply, or too large.
            String trace = error + "\n    while cell " + count + " was compiled\n";
            outcome.error = new Fault(error.getClass().getName(), error.toString(), trace);
        }
        boolean ended = outcome.error != null || control.stopped || unfinished;
        outcome.interrupted = control.end() && ended;
        if (outcome.interrupted && outcome.error == null) outcome.error = Fault.interruption();
        if (outcome.error != null) outcome.repr = outcome.json = null;
        return outcome;
    }

    /** Run one snippet after the other; return whether an interruption left some out. */
    private boolean runEach(String code, Outcome outcome) {
        SourceCodeAnalysis analysis = shell.sourceCodeAnalysis();
        for (String rest = code; !rest.isBlank(); ) {
            String source = rest.stripLeading();
            int line = 1 + lines(code, code.length() - source.length());
            var found = analysis.analyzeCompletion(source);
            boolean whole = found.completeness().isComplete();
            String snippet = whole ? found.source() : source;
            rest = whole ? found.remaining() : "";
            if (snippet == null || snippet.isBlank()) return false;
            outcome.repr = outcome.json = null;
            runOne(snippet, line, outcome);
            if (outcome.error != null || control.stopped) return false;
            if (control.isInterrupted()) return !rest.isBlank();
        }
        return false;
    }

    private void runOne(String source, int line, Outcome outcome) {
        control.json = null;
        // The snippet's number is known before it runs: what it throws names its lines by that.
        List<SnippetEvent> events = new ArrayList<>();
        for (SnippetEvent event : shell.eval(source)) {
            if (event.causeSnippet() == null) events.add(event);
        }
        for (SnippetEvent event : events) {
            Snippet snippet = event.snippet();
            places.put(snippet.id(), new int[] {count, line});
            if (event.status() == Snippet.Status.REJECTED) {
                outcome.error = rejected(snippet, source, line);
            } else if (event.exception() != null) {
                outcome.error = thrown(event.exception());
            } else if (hasValue(snippet) && event.value() != null) {
                outcome.repr = event.value();
                outcome.json = control.json;
            }
        }
    }

    private static boolean hasValue(Snippet snippet) {
        return snippet.kind() == Snippet.Kind.EXPRESSION
            || snippet.subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
    }

    private Fault rejected(Snippet snippet, String source, int line) {
        StringBuilder text = new StringBuilder();
        String first = null;
        for (Diag diag : (Iterable<Diag>) shell.diagnostics(snippet)::iterator) {
            if (!diag.isError()) continue;
            String message = plain(diag.getMessage(Locale.ROOT));
            if (first == null) first = message;
            int at = (int) Math.max(0, Math.min(diag.getPosition(), source.length()));
            int begin = source.lastIndexOf('\n', at - 1) + 1;
            int end = source.indexOf('\n', at);
            String shown = source.substring(begin, end < 0 ? source.length() : end);
            text.append("cell ").append(count).append(", line ").append(line + lines(source, at))
                .append(": ").append(message).append("\n    ").append(shown).append('\n');
        }
        if (first == null) first = "this is not Java";
        return new Fault("CompilationError", first, text.isEmpty() ? first : text.toString());
    }

    private Fault thrown(Throwable error) {
        if (error instanceof UnresolvedReferenceException unresolved) {
            String missing = shell.unresolvedDependencies(unresolved.getSnippet())
                .collect(Collectors.joining(", "));
            String message = "the code uses what is not declared: " + plain(missing);
            return new Fault("UnresolvedReference", message, message + "\n");
        }
        StringBuilder trace = new StringBuilder();
        int causes = 0;
        for (Throwable each = error; each != null && causes < CAUSES_MAX; each = each.getCause()) {
            trace.append(causes++ == 0 ? "" : "Caused by: ").append(headline(each)).append('\n');
            StackTraceElement[] frames = each.getStackTrace();
            for (int at = 0; at < Math.min(frames.length, TRACE_MAX); at++) {
                trace.append("    at ").append(frame(frames[at])).append('\n');
            }
            if (frames.length > TRACE_MAX) {
                trace.append("    and ").append(frames.length - TRACE_MAX).append(" more\n");
            }
        }
        String message = error.getMessage() == null ? "" : plain(error.getMessage());
        return new Fault(type(error), message, trace.toString());
    }

    private static String headline(Throwable error) {
        String message = error.getMessage();
        return message == null ? type(error) : type(error) + ": " + plain(message);
    }

    private static String type(Throwable error) {
        return error instanceof EvalException raised
            ? plain(raised.getExceptionClassName())
            : error.getClass().getName();
    }

    /** A frame with the cell's number and line, if it is of a cell. */
    private String frame(StackTraceElement frame) {
        String file = frame.getFileName();
        int[] place = file != null && file.startsWith("#") ? places.get(file.substring(1)) : null;
        if (place == null) return plain(frame.toString());
        String owner = plain(frame.getClassName());
        String method = frame.getMethodName().replaceFirst("^lambda\\$.*", "lambda");
        String name = owner.isEmpty() ? method : owner + "." + method;
        int line = place[1] + frame.getLineNumber() - 1;
        return (name + " (cell " + place[0] + ", line " + line + ")").strip();
    }

    private static String plain(String text) {
        return WRAPPER.matcher(text).replaceAll("");
    }

    private static int lines(String text, int end) {
        return (int) text.chars().limit(end).filter(each -> each == '\n').count();
    }
}

/** As much of JSON as is needed. */
final class Json {
    private static final int VALUE_MAX = 262_144; // bytes
    private static final int DEPTH_MAX = 200;

    /** Text that is JSON already. */
    static final class Raw {
        final String text;

        Raw(String text) {
            this.text = text;
        }
    }

    /** JSON cannot say it, or not in so few bytes. */
    private static final class Inexact extends RuntimeException {
        Inexact() {
            super(null, null, false, false);
        }
    }

    private final StringBuilder out = new StringBuilder();
    private final boolean exact;

    private Json(boolean exact) {
        this.exact = exact;
    }

    static String text(Object value) {
        Json json = new Json(false);
        json.write(value, 0);
        return json.out.toString();
    }

    /** A value as JSON from which it could be made again, or null. */
    static String exact(Object value) {
        try {
            Json json = new Json(true);
            json.write(value, 0);
            String text = json.out.toString();
            return text.getBytes(StandardCharsets.UTF_8).length <= VALUE_MAX ? text : null;
        } catch (Inexact error) {
            return null;
        }
    }

    private void write(Object value, int depth) {
        if (exact && (depth > DEPTH_MAX || out.length() > VALUE_MAX)) throw new Inexact();
        if (value == null || value instanceof Boolean || value instanceof Integer
            || value instanceof Long || value instanceof Short || value instanceof Byte
            || value instanceof java.math.BigInteger) {
            out.append(value);
        } else if (value instanceof Double || value instanceof Float) {
            double number = ((Number) value).doubleValue();
            if (Double.isNaN(number) || Double.isInfinite(number)) throw new Inexact();
            out.append(number);
        } else if (value instanceof Raw raw) {
            out.append(raw.text);
        } else if (value instanceof String text) {
            string(text);
        } else if (value instanceof Map<?, ?> map) {
            object(map, depth);
        } else if (value instanceof List<?> list) {
            char before = '[';
            for (Object each : list) {
                out.append(before);
                write(each, depth + 1);
                before = ',';
            }
            out.append(before == '[' ? "[]" : "]");
        } else if (value.getClass().isArray() && !(value instanceof char[])) {
            out.append('[');
            for (int at = 0; at < Array.getLength(value); at++) {
                if (at > 0) out.append(',');
                write(Array.get(value, at), depth + 1);
            }
            out.append(']');
        } else {
            throw new Inexact();
        }
    }

    private void object(Map<?, ?> map, int depth) {
        char before = '{';
        for (Map.Entry<?, ?> each : map.entrySet()) {
            if (!(each.getKey() instanceof String key)) throw new Inexact();
            out.append(before);
            string(key);
            out.append(':');
            write(each.getValue(), depth + 1);
            before = ',';
        }
        out.append(before == '{' ? "{}" : "}");
    }

    private void string(String text) {
        if (exact && text.length() > VALUE_MAX) throw new Inexact();
        out.append('"');
        text.codePoints().forEach(each -> {
            boolean half = each >= 0xD800 && each < 0xE000;
            if (half && exact) throw new Inexact();
            if (each == '"' || each == '\\') {
                out.append('\\').append((char) each);
            } else if (each < ' ' || half) {
                out.append(String.format("\\u%04x", half ? 0xFFFD : each));
            } else {
                out.appendCodePoint(each);
            }
        });
        out.append('"');
    }

    /** Read what the agent sends: an object. */
    static Map<?, ?> parse(String text) {
        return (Map<?, ?>) new Reader(text).value();
    }

    private static final class Reader {
        private final String text;
        private int at;

        Reader(String text) {
            this.text = text;
        }

        Object value() {
            space();
            return switch (text.charAt(at)) {
                case '{' -> object();
                case '[' -> array();
                case '"' -> string();
                default -> word();
            };
        }

        private Map<String, Object> object() {
            Map<String, Object> made = new HashMap<>();
            at++;
            while (more('}')) {
                String key = string();
                space();
                at++; // a colon
                made.put(key, value());
            }
            return made;
        }

        private List<Object> array() {
            List<Object> made = new ArrayList<>();
            at++;
            while (more(']')) made.add(value());
            return made;
        }

        /** Go past a comma; false at the end, and past that. */
        private boolean more(char end) {
            space();
            if (text.charAt(at) == ',') {
                at++;
                space();
            }
            if (text.charAt(at) != end) return true;
            at++;
            return false;
        }

        private String string() {
            StringBuilder made = new StringBuilder();
            for (at++; text.charAt(at) != '"'; at++) {
                char each = text.charAt(at);
                if (each != '\\') {
                    made.append(each);
                    continue;
                }
                each = text.charAt(++at);
                int escape = "bfnrt".indexOf(each);
                if (each == 'u') {
                    made.append((char) Integer.parseInt(text.substring(at + 1, at + 5), 16));
                    at += 4;
                } else {
                    made.append(escape < 0 ? each : "\b\f\n\r\t".charAt(escape));
                }
            }
            at++;
            return made.toString();
        }

        private Object word() {
            int begin = at;
            while (at < text.length() && ",]} \t\r\n".indexOf(text.charAt(at)) < 0) at++;
            String word = text.substring(begin, at);
            return switch (word) {
                case "null" -> null;
                case "true" -> true;
                case "false" -> false;
                default -> Double.valueOf(word);
            };
        }

        private void space() {
            while (" \t\r\n".indexOf(text.charAt(at)) >= 0) at++;
        }
    }
}
